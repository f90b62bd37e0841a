"""The commands in the documents work as printed."""

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_dist.config import arguments
from tests.support.marks import exhaustive
from tests.support.processes import ROOT, environment
from tests.support.snippets import Snippet, create_workspace, run_command, snippets
from tests.support.user_guide import NEW_ALGORITHM, guide_snippets, needs_user_files

QUICKSTART_CONFIG = (
    "rounds: 2\nclients: {total: 4, per_round: 2}\nmodel: {name: mlp}\nmonitor: {wandb: {mode: disabled}}\n"
)
READERS_OF_RUNS = ("fl_dist.diagnose", "fl_dist.report", "launch.status", "tail ")


@pytest.mark.parametrize("snippet", [s for s in snippets("sh") if not needs_user_files(s)], ids=lambda s: s.name)
def test_documented_commands_run(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "quickstart.yaml").write_text(QUICKSTART_CONFIG)
    monkeypatch.setattr(arguments, "QUICKSTART", tmp_path / "quick" / "quickstart.yaml")
    create_workspace(tmp_path)
    for block in snippets("yaml"):
        if (sweep := yaml.safe_load(block.text)).get("name") == "my_sweep":
            (tmp_path / "my_sweep.yaml").write_text(yaml.safe_dump(shrink_sweep(sweep)))
    monkeypatch.chdir(tmp_path)
    for command in snippet.commands():
        # Every line is an alternative to those before it and starts in a clean workspace, unless models are compared.
        if "sha256sum" not in snippet.text:
            shutil.rmtree("runs", ignore_errors=True)
        Path("runs/my_sweep/a/wandb/offline-run-20250101_000000-abc").mkdir(parents=True, exist_ok=True)
        if command == "python -m launch.status":
            run_command("python -m fl_dist.main my.yaml run.dir=runs/my")
        for word in command.split() if any(reader in command for reader in READERS_OF_RUNS) else ():
            if re.match(r"runs\b", word):
                folder = "runs/my" if word == "runs" else word.removesuffix("/metrics.jsonl")
                run_command(f"python -m fl_dist.main my.yaml run.dir={folder}")
        # Uploading needs an account and a network.
        run_command(f"{command} --dry-run" if "launch.sync" in command else command)


def shrink_sweep(sweep: dict[str, Any]) -> dict[str, Any]:
    """The sweep with one value per key of its grid."""
    grid = {k: dict([*v.items()][:1]) if isinstance(v, dict) else v[:1] for k, v in sweep["grid"].items()}
    return sweep | {"grid": grid, "set": {"rounds": 1}, "resources": {"tasks_per_node": 2}}


@exhaustive
class TestANewAlgorithm:
    """Follow the guide in a copy of the repository."""

    @pytest.fixture(scope="class")
    @classmethod
    def copy(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        copy = tmp_path_factory.mktemp("copy") / "fl_dist"
        for name in ("fl_dist", "launch", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(ROOT / name, copy / name)
        file, case, reduction = [s.text for s in guide_snippets("python", NEW_ALGORITHM)]
        (copy / "fl_dist" / "algorithms" / "fednova.py").write_text(file)
        insert_after(copy / "tests" / "support" / "harness.py", "CASES: ", "}\n", case)
        insert_after(copy / "tests" / "unit" / "test_properties.py", "REDUCTIONS: ", "]\n", reduction)
        return copy

    def test_every_command_works(self, copy: Path) -> None:
        commands = [c for s in guide_snippets("sh", NEW_ALGORITHM) for c in s.commands()]
        path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
        for command in commands:
            env = environment(PATH=path, PYTHONPATH=str(copy), WANDB_MODE="disabled")
            result = subprocess.run(["bash", "-c", command], cwd=copy, env=env, capture_output=True, text=True)
            assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}{result.stderr[-3000:]}"
        assert self.sha(copy, "fednova") == self.sha(copy, "fednova-2-workers")

    @staticmethod
    def sha(copy: Path, name: str) -> str:
        return hashlib.sha256((copy / "runs" / name / "model.safetensors").read_bytes()).hexdigest()


def insert_after(file: Path, start: str, end: str, text: str) -> None:
    """Insert the text below the definition with this start and end."""
    before, opening, rest = file.read_text().partition(f"\n{start}")
    body, closing, after = rest.partition(f"\n{end}")
    assert opening and closing
    file.write_text(f"{before}{opening}{body}{closing}{text}{after}")
