"""Every launcher of one machine makes the model of one process, and says what went wrong."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from launch import submit, sweep
from tests.support.launchers import in_terminal, ranks, run, start, write_config
from tests.support.marks import exhaustive, timing
from tests.support.run_folder import model_hash, rows
from tests.support.waiting import PATIENCE, Hold, wait_for

pytestmark = timing


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory) -> str:
    """The hash of the model that one process makes."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    code, output = run("fl_dist.main", config, f"run.dir={folder}")
    assert code == 0, output
    return model_hash(folder)


def write_sweep(folder: Path, text: str) -> str:
    file = folder / "sweep.yaml"
    file.write_text(f"dir: {folder}/runs\nset: {{monitor.wandb.mode: disabled}}\n{text}")
    return str(file)


def test_ranks_on_this_machine_make_the_model_of_one_process(config, undisturbed, tmp_path):
    code, output = run("launch.local", config, f"run.dir={tmp_path}/run", "-n", "3")
    assert code == 0, output
    assert output.splitlines()[0] == "3 ranks on one machine, on the CPU"
    assert "server + 2 workers" in output
    assert model_hash(tmp_path / "run") == undisturbed


@pytest.fixture
def hold(monkeypatch, tmp_path) -> Hold:
    """Rank 0 waits after some rounds: the run is not over before somebody disturbs it."""
    hold = Hold(tmp_path / "hold")
    monkeypatch.setenv("FL_DIST_FAULT", hold.at("broadcast:6"))
    return hold


@exhaustive
def test_a_signal_saves_the_run_and_the_same_command_resumes_it(config, undisturbed, hold, tmp_path):
    arguments = [config, f"run.dir={tmp_path}/run", "--ranks", "2"]
    with start("launch.local", arguments) as process:
        wait_for(lambda: hold.held, "the sixth round")
        process.send_signal(signal.SIGINT)
        hold.release()
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    assert "interrupted after round" in output
    assert "Traceback" not in output
    code, output = run("launch.local", *arguments)
    assert code == 0, output
    assert "resuming after round" in output
    assert model_hash(tmp_path / "run") == undisturbed


@exhaustive
def test_a_killed_rank_is_started_again(config, undisturbed, hold, tmp_path):
    with start("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2", "--max-restarts", "1"]) as process:
        wait_for(lambda: hold.held, "the sixth round")
        os.kill(ranks(tmp_path / "run")[0], signal.SIGKILL)
        hold.release()
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert model_hash(tmp_path / "run") == undisturbed


def test_a_killed_server_is_reported_in_one_line(config, hold, tmp_path):
    with start("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2"]) as process:
        wait_for(lambda: hold.held, "the sixth round")
        os.kill(ranks(tmp_path / "run")[-1], signal.SIGKILL)
        hold.release()
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert output.splitlines()[-1] == "error: rank 0 was ended by SIGKILL; start the same command to resume"
    assert "Traceback" not in output


@exhaustive
def test_a_stopped_server_is_reported_in_one_line(config, tmp_path):
    with start("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "3", "rounds=100000"]) as process:
        wait_for(lambda: rows(tmp_path / "run"), "the first round")
        os.kill(ranks(tmp_path / "run")[-1], signal.SIGSTOP)
        lines = iter(process.stdout.readline, "")
        error = next(line for line in lines if line.startswith("error: "))
        os.kill(ranks(tmp_path / "run")[-1], signal.SIGKILL)  # torchrun itself would be more patient
        rest, _ = process.communicate(timeout=PATIENCE)
    assert re.fullmatch(r"error: rank 0 on \S+, the server, was lost .*; start the same command to resume\n", error)
    assert process.returncode == 1
    assert "Traceback" not in rest


@exhaustive
def test_ranks_do_not_outlive_their_launcher(config, tmp_path):
    with start("launch.local", [config, f"run.dir={tmp_path}/run", "-n", "2", "rounds=100000"]) as process:
        wait_for(lambda: rows(tmp_path / "run"), "the first round")
        process.kill()
        wait_for(lambda: not ranks(tmp_path / "run"), "the end of the ranks")


@exhaustive
def test_a_terminal_stays_a_terminal(config, tmp_path):
    code, output = in_terminal("launch.local", config, f"run.dir={tmp_path}/run", "-n", "2", "rounds=2")
    assert code == 0, output
    assert "50%|" in output, "no progress bar"


@exhaustive
def test_missing_data_fails_with_one_line(config, tmp_path):
    code, output = run(
        "launch.local", config, "data.name=npz", "data.path=/none.npz", f"run.dir={tmp_path}/run", "-n", "2"
    )
    assert code == 1
    assert "error: data file /none.npz does not exist" in output
    assert "Traceback" not in output


def test_submitit_runs_the_same_here(config, undisturbed, tmp_path):
    code, output = run("launch.submit", config, f"run.dir={tmp_path}/run", "--tasks-per-node", "2", "--local")
    assert code == 0, output
    assert model_hash(tmp_path / "run") == undisturbed


NOTES = """
import os
from torch import nn

def model(shape, outputs):
    with open(os.environ["NOTES"], "a") as file:
        file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], outputs))
"""


@pytest.mark.parametrize(
    ("asked", "given"), [([], "MIG-7,2"), pytest.param(["--gpus-per-node", "1"], "MIG-7", marks=exhaustive)]
)
def test_submitit_gives_its_tasks_the_gpus_here(asked, given, config, tmp_path, monkeypatch, capsys):
    (tmp_path / "notes.py").write_text(NOTES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTES", f"{tmp_path}/notes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7,2,-1,3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = [config, "rounds=1", "model=notes:model", f"run.dir={tmp_path}/run", "--local", *asked]
    assert submit.main(words) == 0, capsys.readouterr()
    assert set((tmp_path / "notes").read_text().split()) == {given}
    assert re.search(r"^asks     (2 ranks|1 rank) on one machine, one a GPU$", capsys.readouterr().out, re.MULTILINE)


def test_submitit_reports_a_failure_in_one_line(config, tmp_path):
    missing = [config, "data.name=npz", "data.path=/none.npz", f"run.dir={tmp_path}/run"]
    code, output = run("launch.submit", *missing, "--tasks-per-node", "2", "--local")
    assert code == 1
    assert output.splitlines()[-1].startswith("error: ")
    assert "data file /none.npz does not exist" in output.splitlines()[-1]


@exhaustive
def test_a_local_sweep_runs_skips_and_reports(config, tmp_path, capsys):
    good = f"base: {config}\nresources: {{tasks_per_node: 2}}\ngrid: {{rounds: [3], seed: [0, 1]}}\n"
    lost = "list: [{algorithm.name: fedavg}, {label: lost, data: {name: npz, path: /none.npz}}]\n"
    file = write_sweep(tmp_path, good + lost)
    code, output = run("launch.sweep", file, "--local", "-j", "2")
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
