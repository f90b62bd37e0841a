"""The processes of one machine share arrays."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from fl_dist.data import shared_arrays
from fl_dist.main import main
from tests.support.data_files import load_numbers, write_domains
from tests.support.processes import NO_WANDB, run_ranks
from tests.support.run_folder import model_hash
from tests.support.waiting import TIMEOUT_SECONDS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shared_arrays.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class TestArrays:
    def test_concurrent_processes_build_the_arrays_once(self, cache: Path, tmp_path: Path) -> None:
        program = textwrap.dedent(f"""
            import time
            from pathlib import Path
            import numpy as np
            from fl_dist.data import shared_arrays
            def build(allocate):
                with open({str(tmp_path / "calls")!r}, "a") as file:
                    file.write("built\\n")
                time.sleep(0.5)
                allocate("x", (100,), np.int64)[:] = 7
            print(shared_arrays.load_or_build("slow", [Path({str(tmp_path)!r}) / "source"], None, build)["x"].sum())
        """)
        (tmp_path / "source").write_text("a")
        with_pipe = {"stdout": subprocess.PIPE, "text": True}
        ranks = [subprocess.Popen([sys.executable, "-c", program], **with_pipe) for _ in range(3)]  # type: ignore[call-overload]
        assert [rank.communicate(timeout=TIMEOUT_SECONDS)[0] for rank in ranks] == ["700\n"] * 3
        assert (tmp_path / "calls").read_text() == "built\n"

    def test_a_killed_builder_leaves_no_usable_array(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "source").write_text("a")
        child = os.fork()
        if not child:

            def build(allocate: shared_arrays.Allocate) -> None:
                allocate("x", (3, 4), np.int64)
                os.kill(os.getpid(), signal.SIGKILL)

            shared_arrays.load_or_build("numbers", [tmp_path / "source"], None, build)
        os.waitpid(child, 0)
        calls: list[str] = []
        assert load_numbers(tmp_path / "source", calls)[2, 3] == 11
        assert calls == ["x"]


@pytest.fixture
def domains(cache: Path, tmp_path: Path) -> Path:
    return write_domains(tmp_path)


class TestDomains:
    def test_prefetched_rows_give_the_same_bits(self, domains: Path, tmp_path: Path) -> None:
        """All rows on the device; all in files, in one process; all in files, on three ranks."""
        settings = [f"data={{name: pacs, root: {domains}, target: art, size: 16}}", "partition=domains", "model=mlp"]
        settings += [*NO_WANDB, "clients={total: 4, per_round: 2}", "rounds=2", "augment=crop_flip"]
        settings += ["local={epochs: 2, batch_size: 3}", "evaluate.batch_size=3"]
        assert main([*settings, f"run.dir={tmp_path / 'in_memory'}"]) == 0
        assert main([*settings, "topology.data_memory=0", f"run.dir={tmp_path / 'read'}"]) == 0
        codes, outputs = run_ranks(3, [*settings, "topology.data_memory=0", f"run.dir={tmp_path / 'ranks'}"])
        assert codes == [0, 0, 0], outputs
        assert len({model_hash(tmp_path / name) for name in ("in_memory", "read", "ranks")}) == 1
