"""A child process detects CPUs that kill processes which compute in bfloat16."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_dist.config import load
from fl_dist.distributed import bf16
from fl_dist.main import main


class TestBfloat16:
    """A child process detects CPUs that kill processes which compute in bfloat16."""

    CONFIG = ["local.precision=bf16", "topology.device=cpu"]

    @staticmethod
    def faulty_compute(works_without_amx: bool) -> Callable[[], None]:
        def compute() -> None:
            if not (works_without_amx and os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"):
                os.kill(os.getpid(), signal.SIGILL)

        return compute

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")

    def test_bf16_works_without_the_faulty_instructions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bf16, "compute", self.faulty_compute(works_without_amx=True))
        bf16.ensure_bf16_works(load(None, self.CONFIG))
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"

    def test_bf16_on_a_faulty_cpu_is_refused_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(bf16, "compute", self.faulty_compute(works_without_amx=False))
        assert main([*self.CONFIG, f"run.dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: this CPU kills a process that computes with bfloat16")
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()

    def test_other_precisions_start_no_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
        bf16.ensure_bf16_works(load(None, []))

    def test_a_successful_trial_changes_nothing(self) -> None:
        assert bf16._can_compute({})
        assert "ONEDNN_MAX_CPU_ISA" not in os.environ
