"""Promise: nothing is lost. A save is whole or absent; a run goes on from it with the same bits."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fl_dist.machine import faults
from fl_dist.main import main
from fl_dist.storage.checkpoint import Damaged, Manifest, Save, folder_name, newest, newest_round
from tests.harness import saving_at_once
from tests.jobs import QUIET, model_hash, results, started_ranks

SETTINGS = (
    *QUIET,
    "rounds=6",
    "model={name: mlp, hidden: [16]}",
    "partition={name: dirichlet, alpha: 0.3, variant: unbalanced}",
    "clients={total: 8, per_round: 3}",
    "local={epochs: 1, batch_size: 32, lr: 0.05, momentum: 0.0}",
    "algorithm.name=fedgmt",
)
STEPS = ("broadcast", "local", "reduce", "server")
SAVES = ("save-begin", "save-file", "save-written", "save-manifest", "save-switched")
PAUSE = "broadcast:6=sleep:2"
"""However fast the machine is, the run is not over before somebody has seen a few of its rounds."""
# A save may let a round pass, but the first and the last are always made.
KILLS = [f"{step}:{k}" for step in STEPS for k in (1, 3, 5)] + [f"{step}:{k}" for step in SAVES for k in (1, 2)]


def arguments(folder: Path, *more: str) -> list[str]:
    return [*SETTINGS, f"run.dir={folder}", *more]


def forked(folder: Path, fault: str, *more: str) -> int:
    """Run in a child process that ends itself at the fault; its exit status."""
    child = os.fork()
    if child == 0:
        try:
            faults.point = faults.armed(fault)
            os._exit(main(arguments(folder, *more)))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("calm") / "run"
    with saving_at_once():
        assert main(arguments(folder)) == 0
    return folder


@pytest.fixture(scope="module")
def calm_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert main(arguments(folder, "rounds=40", "local.epochs=4")) == 0
    return folder


def assert_same(folder: Path, calm: Path) -> None:
    assert model_hash(folder) == model_hash(calm)
    assert results(folder) == results(calm)


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_at_any_point_changes_nothing(kill: str, calm: Path, tmp_path: Path) -> None:
    assert forked(tmp_path, kill) == -signal.SIGKILL
    assert main(arguments(tmp_path)) == 0
    assert_same(tmp_path, calm)


def test_kills_one_after_another_change_nothing(calm: Path, tmp_path: Path) -> None:
    for point in ("save-file:2", "server:2", "save-switched:1", "reduce:2"):
        assert forked(tmp_path, point) == -signal.SIGKILL
    assert main(arguments(tmp_path)) == 0
    assert_same(tmp_path, calm)


@pytest.mark.parametrize(("point", "rank"), [("local:1", 1), ("reduce:3", 2), ("save-written:1", 1), ("server:4", 0)])
def test_a_rank_that_dies_is_named_and_ends_the_others(point: str, rank: int, calm: Path, tmp_path: Path) -> None:
    pause = ",broadcast:5=sleep:5" if "save" in point else ""  # a save may take longer than all rounds
    with started_ranks(3, arguments(tmp_path), FL_DIST_FAULT=f"{point}@{rank}{pause}") as processes:
        outputs = [p.communicate(timeout=60)[0] for p in processes]
        codes = [p.returncode for p in processes]
    assert codes[rank] == -signal.SIGKILL
    assert all(codes)
    logs = "".join(p.read_text() for p in (tmp_path / "logs").iterdir()) + "".join(outputs)
    assert f"rank {rank}" in logs
    assert "lost (killed, out of memory or hung) in round " in logs
    if point.startswith("local"):
        assert "whose clients were " in logs
    assert main(arguments(tmp_path, "topology.server=shared")) == 0
    assert_same(tmp_path, calm)


def wait_for(condition: object, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_any_rank_saves_and_asks_for_a_requeue(number: int, calm_long: Path, tmp_path: Path) -> None:
    more = ("rounds=40", "local.epochs=4")
    folder, victim = tmp_path / "run", int(number) % 2
    with started_ranks(2, arguments(folder, *more), FL_DIST_FAULT=PAUSE) as processes:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(results(folder)) > 2)
        os.kill(processes[victim].pid, number)
        output = processes[0].communicate(timeout=60)[0]
        processes[1].communicate(timeout=60)
    assert [p.returncode for p in processes] == [75, 75]
    assert "interrupted after round" in output
    reached = len(results(folder))
    assert newest_round(folder / "checkpoint") == reached
    assert main(arguments(folder, *more)) == 0
    assert_same(folder, calm_long)


def test_a_round_longer_than_the_grace_time_is_abandoned(tmp_path: Path) -> None:
    more = ("rounds=50", "local.epochs=100000", "checkpoint.grace=1")
    with started_ranks(2, arguments(tmp_path, *more)) as processes:
        wait_for(lambda: (tmp_path / "logs" / "rank1.log").exists())
        time.sleep(2)
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        codes = [p.wait(timeout=20) for p in processes]
    assert codes == [75, 75]


def newest_of(folder: Path) -> Save:
    found = newest(folder / "checkpoint", json.loads((folder / "run.json").read_text())["id"], pytest.fail)
    assert found is not None
    return found


def interrupted(folder: Path, *more: str) -> Manifest:
    """A run that was killed after its second save."""
    assert forked(folder, "save-switched:2", *more) == -signal.SIGKILL
    return newest_of(folder).manifest


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "remove":
        path.unlink()


HOW = ["flip", "cut", "remove"]


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_save_is_named_and_the_one_before_is_used(
    how: str, calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = interrupted(tmp_path)
    folder = tmp_path / "checkpoint" / folder_name(save.round)
    damage(folder / "server.safetensors", how)
    assert main(arguments(tmp_path)) == 0
    told = capsys.readouterr().out
    assert any(f"resuming after round {earlier} " in told for earlier in range(1, save.round))
    assert f"{folder}/server.safetensors" in told
    assert (tmp_path / "checkpoint" / f"{folder.name}.damaged-1").is_dir(), "what was damaged is set aside"
    assert_same(tmp_path, calm)


@pytest.mark.parametrize("how", HOW)
def test_any_one_damaged_file_loses_nothing(
    how: str, calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an old one, on which every kept save relies."""
    stopped = tmp_path / "stopped"
    with saving_at_once():  # otherwise the disk decides which rounds are saved
        assert forked(stopped, "save-switched:4") == -signal.SIGKILL
    save = newest_of(stopped).manifest
    assert save.round == 4 and save.history
    rounds = [folder_name(r) for r in save.rounds]
    files = [p for p in sorted((stopped / "checkpoint").rglob("*")) if p.is_file() and p.parent.name in rounds]
    assert any(p.suffix == ".pack" and p.parent.name == rounds[0] for p in files)
    for k, file in enumerate(files):
        shutil.copytree(stopped, tmp_path / str(k))
        damage(tmp_path / str(k) / file.relative_to(stopped), how)
        assert main(arguments(tmp_path / str(k))) == 0
        assert_same(tmp_path / str(k), calm)


def test_a_pack_is_restored_from_its_copy(calm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save = interrupted(tmp_path)
    pack = tmp_path / "checkpoint" / folder_name(save.round) / save.packs[0]
    whole = pack.read_bytes()
    damage(pack, "flip")
    newest(tmp_path / "checkpoint", save.run, print)
    assert f"{pack} was damaged and is restored from its copy" in capsys.readouterr().out
    assert pack.read_bytes() == whole


def test_no_whole_save_left_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(tmp_path)
    for file in (tmp_path / "checkpoint").glob("*/server.safetensors"):
        damage(file, "flip")
    assert main(arguments(tmp_path)) == 1
    assert "no whole checkpoint is left" in capsys.readouterr().err


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


def test_a_second_job_on_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as processes:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists())
        assert main(arguments(tmp_path, "rounds=100000")) == 2
        assert f"in use by process {processes[0].pid} on " in capsys.readouterr().err


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        reason = "mounting a small disk needs root"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_warns_and_training_goes_on(tmp_path: Path, calm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        more = ("model={name: mlp, hidden: [48]}", "rounds=3")
        assert main(arguments(disk / "run", *more)) == 1
        told = capsys.readouterr()
        assert "No space left on device" in told.err
        assert "training goes on" in told.err
        assert "no checkpoint could be" in told.err
        assert "Traceback" not in told.err
        assert len(results(disk / "run")) == 3
        assert not [p for p in (disk / "run" / "checkpoint").rglob("*") if p.is_file()]


def test_a_disk_that_fills_up_keeps_the_last_good_save(tmp_path: Path, calm: Path) -> None:
    with small_disk(tmp_path / "disk", "400k") as disk:
        with saving_at_once():
            assert forked(disk / "run", "server:3") == -signal.SIGKILL
        good = newest_of(disk / "run").manifest
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(1 << 10))
        assert forked(disk / "run", "server:3") == -signal.SIGKILL
        assert newest_of(disk / "run").manifest.round >= good.round
        (disk / "filler").unlink()
        assert main(arguments(disk / "run")) == 0
        assert_same(disk / "run", calm)


def test_a_read_only_folder_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert main(arguments(disk / "run")) == 2
        assert "cannot use the run folder" in capsys.readouterr().err


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    assert main(arguments(tmp_path / "a" / "b" / "c")) == 0


def test_metrics_cut_off_in_the_middle_of_a_line_are_mended(calm: Path, tmp_path: Path) -> None:
    interrupted(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"round": 9, "test_')
    assert main(arguments(tmp_path)) == 0
    assert_same(tmp_path, calm)


def broken_client(path: Path) -> list[str]:
    """Data in which client 2 diverges at once."""
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(60, 3)), np.arange(60) % 6
    x[client == 2] = 1e30
    np.savez(path, x_train=x, y_train=np.arange(60) % 2, x_test=x[:6], y_test=np.arange(6) % 2, client=client)
    return [f"data={{name: npz, path: {path}}}", "partition={name: given}", "model={name: mlp, hidden: []}"]


@pytest.mark.parametrize("policy", ["drop", "retry"])
def test_a_dropped_client_is_as_if_not_sampled(policy: str, tmp_path: Path) -> None:
    data = broken_client(tmp_path / "d.npz")
    common = (*QUIET, *data, "rounds=3", "algorithm.name=scaffold", "local={epochs: 2, batch_size: 4, lr: 0.05}")
    with_it, without = "[[0, 2, 3], [1, 4, 5], [2, 3, 5]]", "[[0, 3], [1, 4, 5], [3, 5]]"
    for name, schedule in (("with", with_it), ("without", without)):
        clients = f"clients={{total: 6, schedule: {schedule}, on_failure: {policy}}}"
        assert main([*common, clients, f"run.dir={tmp_path / name}"]) == 0
    assert model_hash(tmp_path / "with") == model_hash(tmp_path / "without")
    assert [r["dropped"] for r in results(tmp_path / "with")] == [[2], [], [2]]
    log = (tmp_path / "with" / "logs" / "rank0.log").read_text()
    assert log.count("client 2") == (4 if policy == "retry" else 2)
    assert 2 not in newest_of(tmp_path / "with").index


def test_too_few_survivors_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = broken_client(tmp_path / "d.npz")
    clients = "clients={total: 6, schedule: [[0, 1], [2, 3]], on_failure: drop, min_survivors: 2}"
    assert main([*QUIET, *data, "rounds=2", clients, f"run.dir={tmp_path / 'run'}"]) == 1
    assert "round 2: 1 of 2 clients survived, clients.min_survivors asks for 2" in capsys.readouterr().err
    assert len(results(tmp_path / "run")) == 1


def test_a_client_past_its_deadline_is_dropped(tmp_path: Path) -> None:
    more = ("clients={total: 8, per_round: 3, deadline: 1e-9, on_failure: drop, min_survivors: 1}",)
    assert main([*arguments(tmp_path), *more]) == 1
    assert "longer than clients.deadline" in (tmp_path / "logs" / "rank0.log").read_text()


def test_keys_never_reach_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    assert main(arguments(tmp_path, "monitor.wandb.mode=offline")) == 0
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_manifest_is_plain_json(calm: Path) -> None:
    path = next((calm / "checkpoint").glob("*/manifest.json"))
    assert set(json.loads(path.read_bytes())) == {"sha256", "body"}


def listening(pids: list[int]) -> set[str]:
    """Addresses on which these processes listen, as /proc shows them."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it may have ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].split(":")[0])
    return found


def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path) -> None:
    with started_ranks(3, arguments(tmp_path, "rounds=100000")) as processes:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists())
        assert listening([p.pid for p in processes]) == {"0100007F"}


def test_a_run_that_is_not_saved_as_it_goes_is_saved_when_interrupted(calm_long: Path, tmp_path: Path) -> None:
    more = ("rounds=40", "local.epochs=4", "checkpoint.every=0")
    with started_ranks(2, arguments(tmp_path, *more), FL_DIST_FAULT=PAUSE) as processes:
        wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(results(tmp_path)) > 2)
        os.kill(processes[1].pid, signal.SIGUSR1)
        assert [p.wait(timeout=60) for p in processes] == [75, 75]
    assert newest_round(tmp_path / "checkpoint")
    assert main(arguments(tmp_path, *more)) == 0
    assert_same(tmp_path, calm_long)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that do nothing meanwhile."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def replaced_by_a_file(folder: Path) -> None:
    folder.rename(folder.with_name("away"))
    folder.touch()


def test_an_interrupted_run_that_cannot_be_saved_does_not_ask_for_a_requeue(tmp_path: Path) -> None:
    with started_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as (process,):
        wait_for(lambda: newest_round(tmp_path / "checkpoint") > 0)
        with stopped([process.pid]):
            replaced_by_a_file(tmp_path / "checkpoint")
        os.kill(process.pid, signal.SIGUSR1)
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "interrupted, and the run could not be saved" in output


def test_clients_that_fail_in_their_first_round_may_move(tmp_path: Path) -> None:
    data = broken_client(tmp_path / "d.npz")
    clients = "clients={total: 6, schedule: [[2, 3], [2, 0, 1], [0, 2], [4, 5, 2]], on_failure: drop}"
    more = (*QUIET, *data, "rounds=4", "algorithm.name=scaffold", clients, "local={epochs: 1, batch_size: 4}")
    with started_ranks(3, [*more, f"run.dir={tmp_path / 'run'}"]) as processes:
        outputs = [p.communicate(timeout=60)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0, 0], outputs
    assert main([*more, f"run.dir={tmp_path / 'alone'}"]) == 0
    assert model_hash(tmp_path / "run") == model_hash(tmp_path / "alone")
