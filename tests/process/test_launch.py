"""Every launcher on one machine gives the model of one process, and reports failures in one line."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from launch import submit, sweep
from tests.support.launchers import find_rank_pids, run_in_terminal, run_launcher, start_launcher, write_config
from tests.support.marks import exhaustive, timing
from tests.support.run_folder import count_records, model_hash
from tests.support.waiting import TIMEOUT_SECONDS, Hold, wait_for

pytestmark = timing


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def reference_hash(config, tmp_path_factory) -> str:
    """The hash of the model that one process trains."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, output = run_launcher("fl_dist.main", config, f"run.dir={folder}")
    assert code == 0, output
    return model_hash(folder)


def write_sweep(folder: Path, text: str) -> str:
    file = folder / "sweep.yaml"
    file.write_text(f"dir: {folder}/runs\nset: {{monitor.wandb.mode: disabled}}\n{text}")
    return str(file)


def test_launch_local_gives_the_model_of_one_process(config, reference_hash, tmp_path):
    code, output = run_launcher("launch.local", config, f"run.dir={tmp_path}/run", "-n", "3")
    assert code == 0, output
    assert output.splitlines()[0] == "3 ranks on one machine, on the CPU"
    assert "server + 2 workers" in output
    assert model_hash(tmp_path / "run") == reference_hash


@pytest.fixture
def hold(monkeypatch, tmp_path) -> Hold:
    """Rank 0 waits in the sixth round, so that the run cannot finish before the test disturbs it."""
    hold = Hold(tmp_path / "hold")
    monkeypatch.setenv("FL_DIST_FAULT", hold.at("broadcast:6"))
    return hold


@exhaustive
def test_a_signal_saves_the_run_and_the_same_command_resumes_it(config, reference_hash, hold, tmp_path):
    arguments = [config, f"run.dir={tmp_path}/run", "--ranks", "2"]
    with start_launcher("launch.local", arguments) as process:
        wait_for(lambda: hold.is_reached, "the sixth round")
        process.send_signal(signal.SIGINT)
        hold.release()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 75, output
    assert "interrupted after round" in output
    assert "Traceback" not in output
    code, output = run_launcher("launch.local", *arguments)
    assert code == 0, output
    assert "resuming after round" in output
    assert model_hash(tmp_path / "run") == reference_hash


@exhaustive
def test_a_killed_rank_is_started_again(config, reference_hash, hold, tmp_path):
    with start_launcher(
        "launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2", "--max-restarts", "1"]
    ) as process:
        wait_for(lambda: hold.is_reached, "the sixth round")
        os.kill(find_rank_pids(tmp_path / "run")[0], signal.SIGKILL)
        hold.release()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    assert model_hash(tmp_path / "run") == reference_hash


def test_a_killed_server_is_reported_in_one_line(config, hold, tmp_path):
    with start_launcher("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2"]) as process:
        wait_for(lambda: hold.is_reached, "the sixth round")
        os.kill(find_rank_pids(tmp_path / "run")[-1], signal.SIGKILL)
        hold.release()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "error: rank 0 was ended by SIGKILL; start the same command to resume"
    assert "Traceback" not in output


@exhaustive
def test_a_stopped_server_is_reported_in_one_line(config, tmp_path):
    with start_launcher("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "3", "rounds=100000"]) as process:
        wait_for(lambda: count_records(tmp_path / "run"), "the first round")
        os.kill(find_rank_pids(tmp_path / "run")[-1], signal.SIGSTOP)
        lines = iter(process.stdout.readline, "")
        error = next(line for line in lines if line.startswith("error: "))
        os.kill(find_rank_pids(tmp_path / "run")[-1], signal.SIGKILL)  # torchrun itself would wait longer
        rest, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert re.fullmatch(r"error: rank 0 on \S+, the server, was lost .*; start the same command to resume\n", error)
    assert process.returncode == 1
    assert "Traceback" not in rest


@exhaustive
def test_ranks_do_not_outlive_their_launcher(config, tmp_path):
    with start_launcher("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2", "rounds=100000"]) as process:
        wait_for(lambda: count_records(tmp_path / "run"), "the first round")
        process.kill()
        wait_for(lambda: not find_rank_pids(tmp_path / "run"), "the end of the ranks")


@exhaustive
def test_ranks_write_to_the_launchers_terminal(config, tmp_path):
    code, output = run_in_terminal("launch.local", config, f"run.dir={tmp_path}/run", "-n", "2", "rounds=2")
    assert code == 0, output
    assert "50%|" in output, "no progress bar"


@exhaustive
def test_missing_data_fails_with_one_line(config, tmp_path):
    code, output = run_launcher(
        "launch.local", config, "data.name=npz", "data.path=/none.npz", f"run.dir={tmp_path}/run", "-n", "2"
    )
    assert code == 1
    assert "error: data file /none.npz does not exist" in output
    assert "Traceback" not in output


def test_local_submission_gives_the_model_of_one_process(config, reference_hash, tmp_path):
    code, output = run_launcher("launch.submit", config, f"run.dir={tmp_path}/run", "--tasks-per-node", "2", "--local")
    assert code == 0, output
    assert model_hash(tmp_path / "run") == reference_hash


MODEL_MODULE = """
import os
from torch import nn

def model(shape, outputs):
    with open(os.environ["VISIBLE_GPUS_FILE"], "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], outputs))
"""


@pytest.mark.parametrize(
    ("options", "gpus"), [([], "MIG-7,2"), pytest.param(["--gpus-per-node", "1"], "MIG-7", marks=exhaustive)]
)
def test_local_submission_assigns_the_visible_gpus(options, gpus, config, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.py").write_text(MODEL_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VISIBLE_GPUS_FILE", f"{tmp_path}/notes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7,2,-1,3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arguments = [config, "rounds=1", "model=notes:model", f"run.dir={tmp_path}/run", "--local", *options]
    assert submit.main(arguments) == 0, capsys.readouterr()
    assert set((tmp_path / "notes").read_text().split()) == {gpus}
    assert re.search(r"^requests (2 ranks|1 rank) on one machine, one per GPU$", capsys.readouterr().out, re.MULTILINE)


def test_local_submission_reports_a_failure_in_one_line(config, tmp_path):
    missing = [config, "data.name=npz", "data.path=/none.npz", f"run.dir={tmp_path}/run"]
    code, output = run_launcher("launch.submit", *missing, "--tasks-per-node", "2", "--local")
    assert code == 1
    assert output.splitlines()[-1].startswith("error: ")
    assert "data file /none.npz does not exist" in output.splitlines()[-1]


def test_a_sweep_with_one_task_is_server_and_worker(config, reference_hash, tmp_path):
    text = f"base: {config}\nresources: {{tasks_per_node: 1}}\ngrid: {{topology.server: [dedicated], seed: [3]}}\n"
    code, output = run_launcher("launch.sweep", write_sweep(tmp_path, text), "--local")
    assert code == 0, output
    assert "1 run: 0 finished, 0 under way, 1 to start" in output
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "logs" / "launch.log").read_text().startswith("1 rank on one machine, on the CPU\n")
    assert model_hash(folder) == reference_hash


@exhaustive
def test_a_local_sweep_skips_finished_runs_and_reports_failures(config, tmp_path, capsys):
    good = f"base: {config}\nresources: {{tasks_per_node: 2}}\ngrid: {{rounds: [3], seed: [0, 1]}}\n"
    missing_data = "list: [{algorithm.name: fedavg}, {label: lost, data: {name: npz, path: /none.npz}}]\n"
    file = write_sweep(tmp_path, good + missing_data)
    code, output = run_launcher("launch.sweep", file, "--local", "-j", "2")
    assert code == 1, output
    assert sweep.main([file, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["fedavg-rounds3-seed0", "finished", "3/3"],
        ["fedavg-rounds3-seed1", "finished", "3/3"],
    ]
    for line in lines[3:]:
        assert re.match(r"lost-rounds3-seed[01]\s+failed\s+data file /none.npz does not exist", line), line
    assert sweep.main([write_sweep(tmp_path, good + "list: [{algorithm.name: fedavg}]"), "--local"]) == 0
    assert capsys.readouterr().out == "2 runs: 2 finished, 0 under way, 0 to start\n"
