"""A save holds what changed, in plain files that nobody else can write."""

import json
from pathlib import Path

import pytest

from fl_dist.main import main
from fl_dist.storage.checkpoint import Damaged, Manifest
from tests.support.checkpoints import arguments, newest_of, train_undisturbed


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "../round-000001/clients-0.pack", "other.bin"])
def test_a_manifest_cannot_name_a_file_outside(name: str, tmp_path: Path) -> None:
    (tmp_path / "round-000004").mkdir()
    Manifest("run", 4, clients={"1": (name, 0, 1, "")}, packs=[name]).write(tmp_path)
    with pytest.raises(Damaged, match="names what cannot belong to it"):
        Manifest.read(tmp_path, 4)


def test_only_changed_clients_are_written_and_old_saves_are_collected(calm: Path) -> None:
    root, save = calm / "checkpoint", newest_of(calm)
    assert save.manifest.round == 6
    assert len(save.manifest.clients) < len(save.index)
    there = {int(p.name.removeprefix("round-")): {f.name for f in p.iterdir()} for p in root.glob("round-*")}
    kept = [Manifest.read(root, r) for r, names in there.items() if "server.safetensors" in names]
    assert len(kept) == 2
    assert set(there) == {r for m in kept for r in m.rounds}
    for round_, names in there.items():
        assert names <= set(Manifest.read(root, round_).files)


def test_nothing_is_pickled_and_nothing_is_open_to_all(calm: Path) -> None:
    for path in [calm, *calm.rglob("*")]:
        assert not path.stat().st_mode & 0o002, f"{path} is writable by everyone"
        assert path.suffix not in (".pt", ".pth", ".pkl", ".pickle")


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    assert main(arguments(tmp_path / "a" / "b" / "c")) == 0


def test_keys_never_reach_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    assert main(arguments(tmp_path, "monitor.wandb.mode=offline")) == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_manifest_is_plain_json(calm: Path) -> None:
    path = next((calm / "checkpoint").glob("*/manifest.json"))
    assert set(json.loads(path.read_bytes())) == {"sha256", "body"}
