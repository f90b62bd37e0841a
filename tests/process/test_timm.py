"""Networks of timm have the same bits on any layout."""

from pathlib import Path

from fl_dist.main import main
from tests.support.marks import exhaustive
from tests.support.processes import run_ranks
from tests.support.run_folder import assert_same
from tests.support.timm_models import WAYS, small_runs


@exhaustive
def test_three_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    assert [main(run) for run in small_runs(tmp_path / "alone")] == [0, 0, 0]
    codes, outputs = run_ranks(3, *small_runs(tmp_path / "ranks"))
    assert not any(codes), outputs
    for way in WAYS:
        assert_same(tmp_path / "ranks" / way, tmp_path / "alone" / way)
