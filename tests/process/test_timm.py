"""Networks of timm have the same bits on any layout."""

from pathlib import Path

from fl_dist.main import main
from tests.support.marks import exhaustive
from tests.support.processes import run_ranks
from tests.support.run_folder import assert_same_run
from tests.support.timm_models import VARIANTS, small_run_arguments


@exhaustive
def test_three_ranks_give_the_bits_of_one_process(tmp_path: Path) -> None:
    assert [main(run) for run in small_run_arguments(tmp_path / "alone")] == [0, 0, 0]
    codes, outputs = run_ranks(3, *small_run_arguments(tmp_path / "ranks"))
    assert not any(codes), outputs
    for variant in VARIANTS:
        assert_same_run(tmp_path / "ranks" / variant, tmp_path / "alone" / variant)
