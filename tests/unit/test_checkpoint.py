"""A checkpoint holds the changed clients, in plain files that others cannot write."""

import json
from pathlib import Path

import pytest

from fl_dist.main import main
from fl_dist.storage.checkpoint import CorruptCheckpointError, Manifest
from tests.support.checkpoints import arguments, read_newest, train_undisturbed


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("reference") / "run")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "../round-000001/clients-0.pack", "other.bin"])
def test_a_manifest_cannot_name_files_outside_its_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "round-000004").mkdir()
    Manifest("run", 4, clients={"1": (name, 0, 1, "")}, packs=[name]).write(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="names files that cannot belong to it"):
        Manifest.read(tmp_path, 4)


def test_only_changed_clients_are_written_and_old_checkpoints_are_removed(reference: Path) -> None:
    root, newest = reference / "checkpoint", read_newest(reference)
    assert newest.manifest.round == 6
    assert len(newest.manifest.clients) < len(newest.index)
    files = {int(p.name.removeprefix("round-")): {f.name for f in p.iterdir()} for p in root.glob("round-*")}
    manifests = [Manifest.read(root, r) for r, names in files.items() if "server.safetensors" in names]
    assert len(manifests) == 2
    assert set(files) == {r for m in manifests for r in m.required_rounds}
    for round_, names in files.items():
        assert names <= set(Manifest.read(root, round_).files)


def test_no_file_is_pickled_or_writable_by_everyone(reference: Path) -> None:
    for path in [reference, *reference.rglob("*")]:
        assert not path.stat().st_mode & 0o002, f"{path} is writable by everyone"
        assert path.suffix not in (".pt", ".pth", ".pkl", ".pickle")


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    assert main(arguments(tmp_path / "a" / "b" / "c")) == 0


def test_api_keys_never_reach_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    assert main(arguments(tmp_path, "monitor.wandb.mode=offline")) == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_manifest_is_plain_json(reference: Path) -> None:
    path = next((reference / "checkpoint").glob("*/manifest.json"))
    assert set(json.loads(path.read_bytes())) == {"sha256", "body"}
