"""A CPU that ends processes which compute in bfloat16 is found out by a child."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_dist.config import load
from fl_dist.machine import bf16
from fl_dist.main import main


class TestBfloat16:
    """A CPU that ends processes which compute in bfloat16 is found out by a child."""

    CONFIG = ["local.precision=bf16", "topology.device=cpu"]

    @staticmethod
    def broken(helped: bool) -> Callable[[], None]:
        def compute() -> None:
            if not (helped and os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX512_CORE_BF16"):
                os.kill(os.getpid(), signal.SIGILL)

        return compute

    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")

    def test_without_the_broken_instructions_it_works(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bf16, "compute", self.broken(helped=True))
        bf16.make_safe(load(None, self.CONFIG))
        assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"

    def test_or_it_is_refused_in_one_line(self, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
        monkeypatch.setattr(bf16, "compute", self.broken(helped=False))
        assert main([*self.CONFIG, f"run.dir={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: local.precision is bf16, but this CPU ends a process that computes with it")
        assert error.count("\n") == 1
        assert not (tmp_path / "run").exists()

    def test_other_precisions_try_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fork", lambda: pytest.fail("a child was started"))
        bf16.make_safe(load(None, []))

    def test_a_trial_that_works_changes_nothing(self) -> None:
        assert bf16._survives({})
        assert "ONEDNN_MAX_CPU_ISA" not in os.environ
