"""Promise: nothing is lost. Whatever ends a run, it resumes from its last checkpoint with the same bits."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from fl_dist.main import main
from fl_dist.storage.checkpoint import Manifest, folder_name, newest_checkpoint
from tests.support.checkpoints import (
    arguments,
    read_newest,
    replace_by_file,
    run_forked,
    run_forked_main,
    train_undisturbed,
)
from tests.support.harness import TrainingHarness, algorithm, synchronous_checkpoints
from tests.support.harness import run as run_config
from tests.support.marks import examples, timing
from tests.support.processes import pause_processes, start_ranks
from tests.support.run_folder import assert_same_run, count_records, newest_saved_round, reproducible_records
from tests.support.waiting import Hold, wait_for

ROUND_STEPS = ("broadcast", "local", "reduce", "server")
CHECKPOINT_STEPS = ("save-begin", "save-file", "save-written", "save-manifest", "save-switched")
# A checkpoint may skip a round, but the first and the last are always written.
KILLS = [f"{step}:{k}" for step in ROUND_STEPS for k in (1, 3, 5)] + [
    f"{step}:{k}" for step in CHECKPOINT_STEPS for k in (1, 2)
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("reference") / "run")


@pytest.fixture(scope="module")
def long_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "run"
    assert main(arguments(folder, "rounds=40", "local.epochs=4")) == 0
    return folder


@pytest.mark.parametrize("kill", KILLS)
def test_a_kill_at_any_point_changes_nothing(kill: str, reference: Path, tmp_path: Path) -> None:
    assert run_forked(tmp_path, kill) == -signal.SIGKILL
    assert main(arguments(tmp_path)) == 0
    assert_same_run(tmp_path, reference)


def test_repeated_kills_change_nothing(reference: Path, tmp_path: Path) -> None:
    for point in ("save-file:2", "server:2", "save-switched:1", "reduce:2"):
        assert run_forked(tmp_path, point) == -signal.SIGKILL
    assert main(arguments(tmp_path)) == 0
    assert_same_run(tmp_path, reference)


@timing
@pytest.mark.parametrize(
    ("point", "rank"),
    examples(
        [("local:1", 1), ("reduce:3", 2), ("save-written:1", 1), ("server:4", 0)], [("local:1", 1), ("server:4", 0)]
    ),
)
def test_a_rank_that_dies_is_named_and_ends_the_others(point: str, rank: int, reference: Path, tmp_path: Path) -> None:
    folder, hold = tmp_path / "run", Hold(tmp_path / "hold")
    faults = f"{point}@{rank}," + hold.at("broadcast:6")  # a checkpoint may take longer than all rounds
    with start_ranks(3, arguments(folder), FL_DIST_FAULT=faults) as processes:
        wait_for(lambda: processes[rank].poll() is not None, f"the exit of rank {rank}")
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
    assert_same_run(folder, reference)


@timing
@pytest.mark.parametrize(
    "number",
    examples([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT], [signal.SIGUSR1, signal.SIGTERM]),
)
def test_a_signal_to_any_rank_saves_and_exits_with_the_requeue_code(
    number: int, long_reference: Path, tmp_path: Path
) -> None:
    more = ("rounds=40", "local.epochs=4")
    folder, rank, hold = tmp_path / "run", int(number) % 2, Hold(tmp_path / "hold")
    with start_ranks(2, arguments(folder, *more), FL_DIST_FAULT=hold.at("broadcast:6")) as processes:
        wait_for(lambda: hold.is_reached, "the sixth round")
        os.kill(processes[rank].pid, number)
        hold.release()
        output = processes[0].communicate()[0]
        processes[1].communicate()
    assert [p.returncode for p in processes] == [75, 75]
    assert "interrupted after round" in output
    rounds = len(reproducible_records(folder))
    assert newest_saved_round(folder) == rounds
    assert main(arguments(folder, *more)) == 0
    assert_same_run(folder, long_reference)


@timing
def test_a_round_longer_than_the_grace_time_is_abandoned(tmp_path: Path) -> None:
    hold = Hold(tmp_path / "hold")
    settings = arguments(tmp_path / "run", "checkpoint.grace=1")
    with start_ranks(2, settings, FL_DIST_FAULT=hold.at("step:3@1")) as processes:
        wait_for(lambda: hold.is_reached, "the third step")
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        codes = [p.wait() for p in processes]
    assert codes == [75, 75]


def run_interrupted(folder: Path, *more: str) -> Manifest:
    """Run until killed after the second checkpoint; return that checkpoint's manifest."""
    assert run_forked(folder, "save-switched:2", *more) == -signal.SIGKILL
    return read_newest(folder).manifest


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data[: len(data) // 2] if how == "cut" else data)
    if how == "remove":
        path.unlink()


DAMAGES = ["flip", "cut", "remove"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    how: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = run_interrupted(tmp_path)
    folder = tmp_path / "checkpoint" / folder_name(manifest.round)
    damage(folder / "server.safetensors", how)
    assert main(arguments(tmp_path)) == 0
    captured = capsys.readouterr()
    assert any(f"resuming after round {earlier} " in captured.out for earlier in range(1, manifest.round))
    warnings = [line for line in captured.err.splitlines() if line.startswith("warning: ")]
    assert any(f"{folder}/server.safetensors" in line for line in warnings)
    assert (tmp_path / "checkpoint" / f"{folder.name}.damaged-1").is_dir(), "the damaged checkpoint is renamed"
    assert_same_run(tmp_path, reference)


@pytest.mark.parametrize("how", examples(DAMAGES, ["flip"]))
def test_any_one_damaged_file_loses_nothing(
    how: str, reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an old one, on which all remaining checkpoints depend."""
    interrupted = tmp_path / "stopped"
    with synchronous_checkpoints():  # otherwise the disk decides which rounds have a checkpoint
        assert run_forked(interrupted, "save-switched:4") == -signal.SIGKILL
    manifest = read_newest(interrupted).manifest
    assert manifest.round == 4 and manifest.history
    rounds = [folder_name(r) for r in manifest.required_rounds]
    files = [p for p in sorted((interrupted / "checkpoint").rglob("*")) if p.is_file() and p.parent.name in rounds]
    assert any(p.suffix == ".pack" and p.parent.name == rounds[0] for p in files)
    for k, file in enumerate(files):
        shutil.copytree(interrupted, tmp_path / str(k))
        damage(tmp_path / str(k) / file.relative_to(interrupted), how)
        assert main(arguments(tmp_path / str(k))) == 0
        assert_same_run(tmp_path / str(k), reference)


def test_a_pack_is_restored_from_its_copy(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = run_interrupted(tmp_path)
    pack = tmp_path / "checkpoint" / folder_name(manifest.round) / manifest.packs[0]
    intact = pack.read_bytes()
    damage(pack, "flip")
    newest_checkpoint(tmp_path / "checkpoint", manifest.run, print)
    assert f"{pack} is damaged; restoring it from its copy" in capsys.readouterr().out
    assert pack.read_bytes() == intact


def test_no_complete_checkpoint_left_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_interrupted(tmp_path)
    for file in (tmp_path / "checkpoint").glob("*/server.safetensors"):
        damage(file, "flip")
    assert main(arguments(tmp_path)) == 1
    assert "no complete checkpoint is left" in capsys.readouterr().err


@timing
def test_a_second_job_on_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as processes:
        wait_for(lambda: count_records(tmp_path), "a round")
        assert main(arguments(tmp_path, "rounds=100000")) == 2
        assert f"in use by process {processes[0].pid} on " in capsys.readouterr().err


def test_metrics_cut_off_in_the_middle_of_a_line_are_repaired(reference: Path, tmp_path: Path) -> None:
    run_interrupted(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"round": 9, "test_')
    assert main(arguments(tmp_path)) == 0
    assert_same_run(tmp_path, reference)


@timing
def test_a_run_without_periodic_checkpoints_is_saved_when_interrupted(long_reference: Path, tmp_path: Path) -> None:
    more = ("rounds=40", "local.epochs=4", "checkpoint.every=0")
    folder, hold = tmp_path / "run", Hold(tmp_path / "hold")
    with start_ranks(2, arguments(folder, *more), FL_DIST_FAULT=hold.at("broadcast:6")) as processes:
        wait_for(lambda: hold.is_reached, "the sixth round")
        os.kill(processes[1].pid, signal.SIGUSR1)
        hold.release()
        assert [p.wait() for p in processes] == [75, 75]
    assert newest_saved_round(folder)
    assert main(arguments(folder, *more)) == 0
    assert_same_run(folder, long_reference)


@timing
def test_an_interrupted_run_that_cannot_be_saved_is_not_requeued(tmp_path: Path) -> None:
    with start_ranks(1, arguments(tmp_path, "rounds=100000", "topology.server=shared")) as (process,):
        wait_for(lambda: newest_saved_round(tmp_path), "a checkpoint")
        with pause_processes([process.pid]):
            replace_by_file(tmp_path / "checkpoint")
        os.kill(process.pid, signal.SIGUSR1)
        output = process.communicate()[0]
    assert process.returncode == 1
    assert "interrupted, and the run could not be saved" in output


def test_a_killed_process_loses_no_algorithm_state(tmp_path: Path) -> None:
    problem = TrainingHarness(tmp_path)
    config, folder = problem.config(algorithm("fedgmt_v2"), checkpoint={"every": 1}), tmp_path / "killed"
    (tmp_path / "killed.json").write_text(json.dumps(config))
    with synchronous_checkpoints():
        assert run_forked_main("local:8", [f"{tmp_path}/killed.json", f"run.dir={folder}"]) == -signal.SIGKILL
    assert newest_saved_round(folder) > 0
    assert run_config(config, folder).sha == problem.run(problem.config(algorithm("fedgmt_v2"))).sha
