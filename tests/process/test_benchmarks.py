"""The benchmarks run; no time is checked."""

import re
import sys

import pytest

from benchmarks.round import HEADER
from tests.support.marks import exhaustive
from tests.support.processes import run


@exhaustive
def test_the_output_is_well_formed_markdown() -> None:
    code, output = run([sys.executable, "-m", "benchmarks.round", "--case", "protocol", "--repeats", "1"])
    assert code == 0, output
    *rows, checkpoints = output.splitlines()
    assert re.fullmatch(r"FedAvg, MLP 64-32-10: \d\.\d\d saves per round", checkpoints)
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert table[0] == list(HEADER)
    assert {len(row) for row in table} == {len(HEADER)} and len(table) == 2 + 3
    for _, ours, theirs, ratio, limit, verdict in table[2:]:
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.05)
        assert verdict == ("holds" if float(ratio) <= float(limit.removeprefix("≤ ")) else "OVER")
