"""Promise: nothing is lost. Whatever ends a run, it goes on from its last save with the same bits."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from fl_dist.main import main
from fl_dist.storage.checkpoint import Manifest, folder_name, newest
from tests.support import harness
from tests.support.checkpoints import arguments, forked, newest_of, replaced_by_a_file, train_undisturbed
from tests.support.harness import Lab, algorithm, python, saving_at_once
from tests.support.marks import examples, timing
from tests.support.processes import started_ranks, stopped
from tests.support.run_folder import assert_same, results, rows, saved
from tests.support.waiting import Hold, wait_for

STEPS = ("broadcast", "local", "reduce", "server")
SAVES = ("save-begin", "save-file", "save-written", "save-manifest", "save-switched")
# A save may let a round pass, but the first and the last are always made.
KILLS = [f"{step}:{k}" for step in STEPS for k in (1, 3, 5)] + [f"{step}:{k}" for step in SAVES for k in (1, 2)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("calm") / "run")


@pytest.fixture(scope="module")
def calm_long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert main(arguments(folder, "rounds=40", "local.epochs=4")) == 0
    return folder


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


@timing
@pytest.mark.parametrize(
    ("point", "rank"),
    examples(
        [("local:1", 1), ("reduce:3", 2), ("save-written:1", 1), ("server:4", 0)], [("local:1", 1), ("server:4", 0)]
    ),
)
def test_a_rank_that_dies_is_named_and_ends_the_others(point: str, rank: int, calm: Path, tmp_path: Path) -> None:
    folder, hold = tmp_path / "run", Hold(tmp_path / "hold")
    faults = f"{point}@{rank}," + hold.at("broadcast:6")  # a save may take longer than all rounds
    with started_ranks(3, arguments(folder), FL_DIST_FAULT=faults) as processes:
        wait_for(lambda: processes[rank].poll() is not None, f"the death of rank {rank}")
        hold.release()
        outputs = [p.communicate()[0] for p in processes]
        codes = [p.returncode for p in processes]
    assert codes[rank] == -signal.SIGKILL
    assert all(codes)
    logs = "".join(p.read_text() for p in (folder / "logs").iterdir()) + "".join(outputs)
    assert f"rank {rank}" in logs
    assert "lost (killed, out of memory or hung) in round " in logs
    if point.startswith("local"):
        assert "whose clients were " in logs
    assert main(arguments(folder, "topology.server=shared")) == 0
    assert_same(folder, calm)


@timing
@pytest.mark.parametrize(
    "number",
    examples([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT], [signal.SIGUSR1, signal.SIGTERM]),
)
def test_a_signal_to_any_rank_saves_and_asks_for_a_requeue(number: int, calm_long: Path, tmp_path: Path) -> None:
    more = ("rounds=40", "local.epochs=4")
    folder, victim, hold = tmp_path / "run", int(number) % 2, Hold(tmp_path / "hold")
    with started_ranks(2, arguments(folder, *more), FL_DIST_FAULT=hold.at("broadcast:6")) as processes:
        wait_for(lambda: hold.held, "the sixth round")
        os.kill(processes[victim].pid, number)
        hold.release()
        output = processes[0].communicate()[0]
        processes[1].communicate()
    assert [p.returncode for p in processes] == [75, 75]
    assert "interrupted after round" in output
    reached = len(results(folder))
    assert saved(folder) == reached
    assert main(arguments(folder, *more)) == 0
    assert_same(folder, calm_long)


@timing
def test_a_round_longer_than_the_grace_time_is_abandoned(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    endless = arguments(tmp_path / "run", "checkpoint.grace=1")
    with started_ranks(2, endless, FL_DIST_FAULT=hold.at("step:3@1")) as processes:
        wait_for(lambda: hold.held, "the third step")
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        codes = [p.wait() for p in processes]
    assert codes == [75, 75]


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


@pytest.mark.parametrize("how", examples(HOW, ["flip"]))
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


@timing
def test_a_second_job_on_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with started_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as processes:
        wait_for(lambda: rows(tmp_path), "a round")
        assert main(arguments(tmp_path, "rounds=100000")) == 2
        assert f"in use by process {processes[0].pid} on " in capsys.readouterr().err


def test_metrics_cut_off_in_the_middle_of_a_line_are_mended(calm: Path, tmp_path: Path) -> None:
    interrupted(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"round": 9, "test_')
    assert main(arguments(tmp_path)) == 0
    assert_same(tmp_path, calm)


@timing
def test_a_run_that_is_not_saved_as_it_goes_is_saved_when_interrupted(calm_long: Path, tmp_path: Path) -> None:
    more = ("rounds=40", "local.epochs=4", "checkpoint.every=0")
    folder, hold = tmp_path / "run", Hold(tmp_path / "hold")
    with started_ranks(2, arguments(folder, *more), FL_DIST_FAULT=hold.at("broadcast:6")) as processes:
        wait_for(lambda: hold.held, "the sixth round")
        os.kill(processes[1].pid, signal.SIGUSR1)
        hold.release()
        assert [p.wait() for p in processes] == [75, 75]
    assert saved(folder)
    assert main(arguments(folder, *more)) == 0
    assert_same(folder, calm_long)


@timing
def test_an_interrupted_run_that_cannot_be_saved_does_not_ask_for_a_requeue(tmp_path: Path) -> None:
    with started_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as (process,):
        wait_for(lambda: saved(tmp_path), "a save")
        with stopped([process.pid]):
            replaced_by_a_file(tmp_path / "checkpoint")
        os.kill(process.pid, signal.SIGUSR1)
        output = process.communicate()[0]
    assert process.returncode == 1
    assert "interrupted, and the run could not be saved" in output


def test_a_killed_process_loses_nothing_of_its_algorithm(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    config, folder = lab.config(algorithm("fedgmt_v2"), checkpoint={"every": 1}), tmp_path / "killed"
    (tmp_path / "killed.json").write_text(json.dumps(config))
    python("-m", "fl_dist.main", f"{tmp_path}/killed.json", f"run.dir={folder}", expect=-9, FL_DIST_FAULT="local:8")
    assert harness.run(config, folder).sha == lab.run(lab.config(algorithm("fedgmt_v2"))).sha
