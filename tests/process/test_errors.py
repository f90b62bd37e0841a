"""Promise: an error is one line and a nonzero exit code on every rank."""

import time
from pathlib import Path

import numpy as np

from fl_dist.main import main
from tests.support.data_files import SMALL_RUN, npz_arguments, save_npz
from tests.support.processes import run, start_ranks, torchrun


def expect_on_every_rank(ranks: int, arguments: list[str], message: str) -> list[int]:
    start_time = time.monotonic()
    with start_ranks(ranks, arguments) as processes:
        outputs = [p.communicate()[0] for p in processes]
        codes = [p.returncode for p in processes]
    assert all(codes), outputs
    assert message in outputs[0]
    assert outputs[0].count("error: ") == 1
    assert "Traceback" not in "".join(outputs)
    # Most of this is the import of torch on a busy machine.
    assert time.monotonic() - start_time < 60
    return codes


def test_an_unknown_key_ends_every_rank(tmp_path: Path) -> None:
    expect_on_every_rank(3, [*SMALL_RUN, "local.lrr=1", f"run.dir={tmp_path}"], "unknown key local.lrr")


def test_nan_in_the_data_ends_every_rank(tmp_path: Path) -> None:
    x = np.zeros((40, 3))
    x[7, 1] = np.nan
    data = npz_arguments(save_npz(tmp_path / "d.npz", x_train=x))
    expect_on_every_rank(3, [*SMALL_RUN, *data, f"run.dir={tmp_path / 'run'}"], "x_train")


def test_an_empty_client_ends_every_rank(tmp_path: Path) -> None:
    data = npz_arguments(save_npz(tmp_path / "d.npz", client=np.arange(40) % 3))
    expected = "the data has clients 0 to 2, but clients.total is 4; set it to 3"
    expect_on_every_rank(3, [*SMALL_RUN, *data, f"run.dir={tmp_path / 'run'}"], expected)


def test_a_folder_of_another_config_ends_every_rank(tmp_path: Path) -> None:
    assert main([*SMALL_RUN, f"run.dir={tmp_path / 'run'}"]) == 0
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    arguments = [*SMALL_RUN, f"run.dir={tmp_path / 'run'}", "local.lr=0.5"]
    message = "belongs to another config (local.lr: 0.05 -> 0.5); choose another run.dir"
    assert expect_on_every_rank(3, arguments, message) == [2, 2, 2]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before


def test_a_single_rank_is_server_and_worker(tmp_path: Path) -> None:
    code, output = run([*torchrun(1), "-m", "fl_dist.main", *SMALL_RUN, f"run.dir={tmp_path}"])
    assert code == 0, output
    assert "one process on cpu" in output
