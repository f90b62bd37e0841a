"""What launchers check, ask for and say before they start anything."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launch import local, submit, sweep, sync, task
from launch.devices import placed, visible_gpus
from tests.support.fake_runs import pretend
from tests.support.launchers import write_config
from tests.support.processes import ROOT, environment


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> str:
    return write_config(tmp_path_factory.mktemp("config"))


def write_sweep(folder: Path, text: str) -> str:
    file = folder / "sweep.yaml"
    file.write_text(f"dir: {folder}/runs\nset: {{monitor.wandb.mode: disabled}}\n{text}")
    return str(file)


@pytest.mark.parametrize("launcher", [local, submit])
def test_a_bad_config_starts_nothing(launcher, config, tmp_path, capsys):
    assert launcher.main([config, "local.lrr=1", f"run.dir={tmp_path}/run"]) == 2
    assert capsys.readouterr().err == "error: unknown key local.lrr (set in the command line); did you mean 'lr'?\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("launcher", [local, submit])
def test_a_finished_run_is_not_started_again(launcher, config, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert launcher.main([config, f"run.dir={tmp_path}"]) == 2
    assert "is finished" in capsys.readouterr().err


def test_the_dry_run_shows_the_batch_script_of_a_profile(config, tmp_path, capsys):
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text(
        "here: {partition: fast, account: us, qos: low, hours: 2, setup: [module load x], sbatch: {mail-user: me}}"
    )
    where = ["--profiles", str(profiles), "--profile", "here"]
    arguments = [config, f"run.dir={tmp_path}/run", "--nodes", "2", "--gpus-per-node", "8", "--dry-run", *where]
    assert submit.main(arguments) == 0
    script = capsys.readouterr().out
    for option in (
        "partition=fast",
        "account=us",
        "qos=low",
        "time=120",
        "nodes=2",
        "ntasks-per-node=8",
        "mail-user=me",
    ):
        assert f"#SBATCH --{option}\n" in script
    assert re.search(r"^srun .*--cpus-per-task=2 ", script, re.MULTILINE), "which srun does not inherit"
    assert "\nmodule load x\n" in script
    assert not (tmp_path / "run").exists()


def test_profiles_are_checked(config, tmp_path, capsys):
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text("here: {partitoin: fast}")
    assert submit.main([config, "--profiles", str(profiles), "--profile", "here", "--dry-run"]) == 2
    assert "unknown key partitoin in profile here" in capsys.readouterr().err
    assert submit.main([config, "--profiles", str(profiles), "--profile", "her", "--dry-run"]) == 2
    assert "no profile 'her'" in capsys.readouterr().err


def test_without_slurm_submitting_says_so(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.main([config, f"run.dir={tmp_path}/run"]) == 2
    assert "no sbatch on the PATH" in capsys.readouterr().err


def test_more_gpus_than_there_are_start_nothing(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert submit.main([config, f"run.dir={tmp_path}/run", "--local", "--gpus-per-node", "3"]) == 2
    assert capsys.readouterr().err == "error: --gpus-per-node is 3, but 2 GPUs can be seen here\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "gpus", "nodes", "words"),
    [
        (3, 0, 1, "3 ranks on one machine, on the CPU"),
        (1, 2, 1, "1 rank on one machine, one a GPU"),
        (8, 8, 2, "16 ranks on 2 nodes, one a GPU"),
        (4, 2, 1, "4 ranks on one machine, sharing 2 GPUs"),
        (4, 2, 3, "12 ranks on 3 nodes, sharing 2 GPUs a node"),
    ],
)
def test_launchers_say_what_they_ask_for(ranks, gpus, nodes, words):
    assert placed(ranks, gpus, nodes) == words


def test_ranks_on_the_cpu_see_no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible_gpus("auto"), visible_gpus("cuda"), visible_gpus("cpu")) == (["0", "1"], ["0", "1"], [])


@pytest.mark.parametrize(("tasks", "cpus"), [({}, "16"), ({"SLURM_NTASKS_PER_NODE": "4"}, "64")])
def test_the_launcher_of_a_node_gets_the_cpus_of_the_job(tasks, cpus, config, tmp_path):
    script = """
        srun() { echo "$SRUN_CPUS_PER_TASK CPUs, ${*:1:4}"; }
        scontrol() { echo n1; }
        squeue() { :; }
        source "$FL_DIST_HOME/slurm/common.sh"
        train "$@"
    """
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_CPUS_PER_TASK": "16"}
    env = environment(PYTHON=sys.executable, FL_DIST_HOME=str(ROOT), SLURM_GPUS_ON_NODE="4", **job, **tasks)
    done = subprocess.run(
        ["bash", "-c", script, "job", f"{tmp_path}/run", config], env=env, capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    assert first == f"job 7 on n1, 4 ranks and 4 GPUs a node: {tmp_path}/run"
    assert second == f"{cpus} CPUs, --kill-on-bad-exit=1 --ntasks=1 --ntasks-per-node=1 --gpus-per-node=4"


@pytest.mark.parametrize(("last", "wanted"), [("echo RUNNING", True), ("echo COMPLETING", False), ("exit 1", False)])
def test_a_busy_controller_is_asked_again_whether_a_job_is_still_wanted(last, wanted, config, tmp_path, monkeypatch):
    asked = tmp_path / "asked"
    write_program(tmp_path / "squeue", f'echo >> {asked}; [ "$(wc -l < {asked})" -gt 2 ] || exit 1; {last}')
    write_program(tmp_path / "sleep", "")
    write_program(tmp_path / "srun", "")
    write_program(tmp_path / "scontrol", 'echo "$1"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(task.time, "sleep", lambda seconds: None)
    assert task.still_wanted(SimpleNamespace(cluster="slurm", raw_job_id="7")) == wanted
    assert len(asked.read_text()) == (3 if last.startswith("echo") else 1 + len(task.PAUSES))
    asked.unlink()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "FL_DIST_HOME": str(ROOT)}
    script = ["bash", "-c", 'source "$FL_DIST_HOME/slurm/common.sh"; train "$@"', "job", f"{tmp_path}/run", config]
    done = subprocess.run(script, env=environment(PYTHON=sys.executable, **job), capture_output=True, text=True)
    assert done.returncode == 75
    assert (
        done.stdout.splitlines()[1:]
        == ["interrupted: the job goes back to the queue and will resume", "requeue"] * wanted
    )


def write_program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {seed: [0], local.lrr: [1, 2]}", "run seed0-lrr1: unknown key local.lrr"),
        ("gird: {seed: [0]}", "unknown key gird in"),
        ("grid: {seed: []}", "names no run"),
        ("list: [{label: a, seed: 1}, {label: a, seed: 2}]", "several runs are named a"),
        ("grid: {seed: [0]}\nbase: none.yaml", "cannot read"),
    ],
)
def test_a_sweep_is_validated_before_anything_starts(text, message, tmp_path, capsys):
    assert sweep.main([write_sweep(tmp_path, text), "--local"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["sweep_digits.yaml", "results/cifar10.yaml"])
def test_the_sweeps_that_come_along_are_valid(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, cells = sweep.read(f"configs/{name}")
    assert len({cell.name for cell in cells}) == len(cells) >= 6


def test_finished_runs_of_a_sweep_are_not_started_again(tmp_path, capsys):
    file = write_sweep(tmp_path, "grid: {seed: [0, 1]}")
    _, cells = sweep.read(file)
    for cell in cells:
        pretend(Path(cell.run), rounds=cell.rounds)
    assert sweep.main([file, "--local"]) == 0
    assert capsys.readouterr().out == "2 runs: 2 finished, 0 under way, 0 to start\n"


def test_one_task_is_refused_before_anything_starts(tmp_path, capsys):
    text = "resources: {tasks_per_node: 1}\ngrid: {seed: [0]}"
    assert sweep.main([write_sweep(tmp_path, text), "--local"]) == 2
    assert "one task leaves no worker beside the server" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_sync_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert sync.main([str(tmp_path)]) == 1
    assert "no offline W&B record" in capsys.readouterr().err
    record = tmp_path / "run" / "wandb" / "offline-run-20250101_000000-abc"
    record.mkdir(parents=True)
    assert sync.main([str(tmp_path), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{record}\n"
    assert sync.main([str(tmp_path)]) == 1
    assert "wandb login" in capsys.readouterr().err
