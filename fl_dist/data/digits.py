"""The embedded data set: 8x8 handwritten digits, 1,437 for training and 360 for testing (DIGITS.txt)."""

from dataclasses import replace
from pathlib import Path

from fl_dist.data.dataset import Dataset, datasets
from fl_dist.data.npz import read_npz

FILE = Path(__file__).with_name("digits.npz")
# Of the training pixels, which are 0 to 16.
MEAN, STD = 4.886134 / 255, 6.017907 / 255


@datasets.register
def digits() -> Dataset:
    """UCI handwritten digits, shipped with the program."""
    return replace(read_npz(FILE), mean=(MEAN,), std=(STD,))
