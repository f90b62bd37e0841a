"""Checks, requests and output of launchers before they start a run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from submitit import JobEnvironment

from fl_dist.config.sweep_file import Sweep
from fl_dist.config.sweeps import read_sweep
from launch import local, requeue, status, submit, sweep, sync, task
from launch.devices import describe_placement, visible_gpus
from tests.support.launchers import write_config
from tests.support.processes import ROOT, environment
from tests.support.sample_runs import write_run


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
    assert capsys.readouterr().err == "error: unknown key local.lrr (set on the command line); did you mean 'lr'?\n"
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
    profile = ["--profiles", str(profiles), "--profile", "here"]
    arguments = [config, f"run.dir={tmp_path}/run", "--nodes", "2", "--gpus-per-node", "8", "--dry-run", *profile]
    assert submit.main(arguments) == 0
    script = capsys.readouterr().out
    for option in (
        "partition=fast",
        "account=us",
        "qos=low",
        "time=120",
        "nodes=2",
        "ntasks-per-node=8",
        "mem=131072M",
        "mail-user=me",
    ):
        assert f"#SBATCH --{option}\n" in script
    assert re.search(r"^srun .*--cpus-per-task=2 ", script, re.MULTILINE), "srun does not inherit it"
    assert "\nmodule load x\n" in script
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("seeds", "array"), [("[0]", None), ("[0, 1, 2]", "0-2%2")])
def test_the_dry_run_of_a_sweep_shows_the_script_of_its_array(seeds, array, tmp_path, capsys):
    file = write_sweep(tmp_path, f"grid: {{seed: {seeds}}}\nresources: {{parallel: 2}}\n")
    assert sweep.main([file, "--dry-run"]) == 0
    assert re.findall(r"^#SBATCH --array=(.*)$", capsys.readouterr().out, re.MULTILINE) == ([array] if array else [])


def test_the_dry_run_of_a_finished_run_shows_its_batch_script(config, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert submit.main([config, f"run.dir={tmp_path}", "--dry-run"]) == 0
    assert "#SBATCH --nodes=1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("queue", "state"), [("8 REQUEUED", "pending"), ("8 RUNNING", "running"), ("7 RUNNING", "failed")]
)
def test_the_status_of_a_run_is_that_of_its_last_job(queue, state, config, slurm_commands, tmp_path, capsys):
    jobs = tmp_path / "run" / "jobs"
    jobs.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("rounds: 3\n")
    for job in ("7", "8"):
        (jobs / f"{job}_submission.sh").touch()
    (jobs / "8_0_log.out").write_text("starting run\nerror: no such data\n")
    write_program(slurm_commands / "squeue", f"echo {queue}")
    assert status.main([str(tmp_path / "run")]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert state in row
    assert row.endswith("no such data") == (state == "failed")


@pytest.mark.parametrize("is_installed", [False, True])
def test_the_status_of_a_run_needs_no_slurm(is_installed, slurm_commands, tmp_path, monkeypatch, capsys):
    if is_installed:
        (slurm_commands / "squeue").touch(0o644)  # for other users
    monkeypatch.setenv("PATH", str(slurm_commands))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("rounds: 3\n")
    assert status.main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "new"


def test_a_failed_attempt_is_reported_by_its_log(config, tmp_path, capsys):
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("rounds: 3\n")
    first, last = ("INFO fl_dist 1, torch 2", "ERROR old reason"), ("INFO fl_dist 1, torch 2", "ERROR no such data")
    (logs / "rank0.log").write_text("".join(f"2026-01-01 10:00:00,000 {line}\n" for line in (*first, *last)))
    assert status.main([str(tmp_path / "run")]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert "failed" in row
    assert row.endswith("no such data")


@pytest.mark.parametrize("launcher", ["submit", "sweep"])
def test_what_sbatch_refuses_is_one_line(launcher, config, slurm_commands, tmp_path, capsys):
    write_program(slurm_commands / "sbatch", "echo 'sbatch: error: invalid partition specified: fsat' >&2; exit 1")
    write_program(slurm_commands / "squeue", "true")
    sweep_file = write_sweep(tmp_path, "grid: {seed: [0]}")
    arguments = [config, f"run.dir={tmp_path}/run"] if launcher == "submit" else [sweep_file]
    assert {"submit": submit, "sweep": sweep}[launcher].main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: sbatch refused the job: invalid partition specified: fsat; --dry-run")


@pytest.mark.parametrize(
    ("profile", "request_line"),
    [("memory_gb: 4", "mem=4096M"), ("sbatch: {mem-per-gpu: 9G}", "mem-per-gpu=9G")],
)
def test_a_profile_replaces_the_memory_of_a_job(profile, request_line, config, tmp_path, capsys):
    (tmp_path / "profiles.yaml").write_text(f"here: {{{profile}}}")
    profiles = ["--profiles", str(tmp_path / "profiles.yaml"), "--profile", "here"]
    assert submit.main([config, f"run.dir={tmp_path}/run", "--gpus-per-node", "8", "--dry-run", *profiles]) == 0
    assert re.findall(r"#SBATCH --(mem.*)", capsys.readouterr().out) == [request_line]


def test_ranks_on_several_nodes_use_the_slurm_name_of_their_node(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    nodes = ["--nodes", "2", "--rendezvous", "gpu03:29500"]
    arguments = local._rendezvous_arguments(local.parser().parse_args(nodes), node=None)
    assert "--local-addr=gpu07" in arguments
    monkeypatch.delenv("SLURMD_NODENAME")
    for more, expected in (([], []), (["--local-addr", "10.0.0.7"], ["--local-addr=10.0.0.7"])):
        arguments = local._rendezvous_arguments(local.parser().parse_args([*nodes, *more]), node=None)
        assert [argument for argument in arguments if argument.startswith("--local-addr")] == expected


def test_the_doctor_is_submitted_as_a_short_job(config, tmp_path, capsys):
    assert submit.main([config, f"run.dir={tmp_path}/run", "--nodes", "2", "--doctor", "--dry-run"]) == 0
    assert "#SBATCH --time=15\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        submit.main([config, "--doctor", "--local"])
    assert "--local: not allowed with argument --doctor" in capsys.readouterr().err


def test_profiles_are_checked(config, tmp_path, capsys):
    profiles = tmp_path / "profiles.yaml"
    profiles.write_text("here: {partitoin: fast}")
    assert submit.main([config, "--profiles", str(profiles), "--profile", "here", "--dry-run"]) == 2
    assert "unknown key partitoin (set in profile here" in capsys.readouterr().err
    assert submit.main([config, "--profiles", str(profiles), "--profile", "her", "--dry-run"]) == 2
    assert "no profile 'her'" in capsys.readouterr().err


def test_a_folder_that_slurm_would_rename_is_refused(config, tmp_path, capsys):
    assert submit.main([config, f"run.dir={tmp_path}/run%a"]) == 2
    assert "replace %a in names of files" in capsys.readouterr().err


def test_submitting_without_slurm_is_refused(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert submit.main([config, f"run.dir={tmp_path}/run"]) == 2
    assert "no sbatch on the PATH" in capsys.readouterr().err


def test_too_many_gpus_start_nothing(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert submit.main([config, f"run.dir={tmp_path}/run", "--local", "--gpus-per-node", "3"]) == 2
    assert capsys.readouterr().err == "error: --gpus-per-node is 3, but only 2 GPUs can be seen here\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("ranks", "gpus", "nodes", "text"),
    [
        (3, 0, 1, "3 ranks on one machine, on the CPU"),
        (1, 2, 1, "1 rank on one machine, one per GPU"),
        (8, 8, 2, "16 ranks on 2 nodes, one per GPU"),
        (4, 2, 1, "4 ranks on one machine, sharing 2 GPUs"),
        (4, 2, 3, "12 ranks on 3 nodes, sharing 2 GPUs per node"),
    ],
)
def test_launchers_print_the_placement(ranks, gpus, nodes, text):
    assert describe_placement(ranks, gpus, nodes) == text


def test_ranks_on_the_cpu_see_no_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (visible_gpus("auto"), visible_gpus("cuda"), visible_gpus("cpu")) == (["0", "1"], ["0", "1"], [])


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1", "FL_DIST_HOME": str(ROOT)}


def run_job_script(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    script = ["bash", "-c", 'source "$FL_DIST_HOME/slurm/common.sh"; train "$@"', "job", *arguments]
    env = environment(**{"PYTHON": sys.executable} | JOB | variables)
    return subprocess.run(script, env=env, capture_output=True, text=True)


@pytest.fixture
def slurm_commands(tmp_path, monkeypatch) -> Path:
    """A folder of fake Slurm commands that only print."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    write_program(folder / "srun", 'echo "$SRUN_CPUS_PER_TASK CPUs, ${*:1:5}"')
    write_program(folder / "scontrol", 'echo "$*"')
    return folder


@pytest.mark.parametrize(("tasks", "cpus"), [({}, "16"), ({"SLURM_NTASKS_PER_NODE": "4"}, "64")])
def test_the_launcher_of_a_node_gets_the_cpus_of_the_job(tasks, cpus, config, slurm_commands, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").touch()
    variables = {"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "16"} | tasks
    completed = run_job_script([f"{tmp_path}/run", config], **variables)
    assert completed.returncode == 0
    first, second = completed.stdout.splitlines()
    assert first == f"job 7 on n1, 4 ranks and 4 GPUs per node: {tmp_path}/run"
    assert second == f"{cpus} CPUs, --kill-on-bad-exit=1 --wait=0 --ntasks=1 --ntasks-per-node=1 --gpus-per-node=4"


@pytest.mark.parametrize(
    ("answer", "is_running"), [("echo RUNNING", True), ("echo COMPLETING", False), ("exit 1", False)]
)
def test_a_busy_controller_is_queried_again(answer, is_running, slurm_commands, tmp_path, monkeypatch):
    calls, delays = tmp_path / "calls", []
    write_program(slurm_commands / "squeue", f'echo >> {calls}; [ "$(wc -l < {calls})" -gt 2 ] || exit 1; {answer}')
    monkeypatch.setattr(requeue.time, "sleep", delays.append)
    assert requeue.is_job_running("7") == is_running
    assert len(calls.read_text()) == (3 if answer.startswith("echo") else 5)
    assert delays == ([1, 2] if answer.startswith("echo") else [1, 2, 4, 8, 0])


@pytest.mark.parametrize(("state", "is_running"), [("RUNNING", True), ("COMPLETING", False), ("", False)])
def test_an_interrupted_job_is_requeued_unless_it_was_cancelled(state, is_running, config, slurm_commands, tmp_path):
    write_program(slurm_commands / "squeue", f'[ "$*" = "--noheader --jobs=7 --format=%T" ] && echo {state}')
    completed = run_job_script([f"{tmp_path}/run", config])
    assert completed.returncode == 75
    expected = ["interrupted: the job goes back to the queue and will resume", "requeue 7"] if is_running else []
    assert completed.stdout.splitlines()[2:] == expected, completed.stderr


@pytest.mark.parametrize(("rank", "state", "numbers"), [(0, "RUNNING", 1), (0, "COMPLETING", 0), (1, "RUNNING", 0)])
def test_an_interrupted_task_is_requeued_by_submitit(rank, state, numbers, slurm_commands):
    """Its handler would end the main thread, but it may be called in another one."""
    write_program(slurm_commands / "squeue", f"echo {state}")
    environment, received = SimpleNamespace(global_rank=rank, cluster="slurm", raw_job_id="7"), []

    def handler(number, frame):
        received.append(number)
        sys.exit(-1)

    task._requeue(environment, handler)
    assert received == [JobEnvironment._usr_sig()] * numbers


def test_a_job_in_a_container_is_requeued_by_the_host(config, slurm_commands, tmp_path):
    """PYTHON is a command without Slurm's programs on its PATH."""
    write_program(slurm_commands / "squeue", "echo RUNNING")
    write_program(tmp_path / "container", f'PATH=/none exec {sys.executable} "$@"')
    completed = run_job_script([f"{tmp_path}/run", config], PYTHON=f"{tmp_path}/container")
    assert completed.stdout.splitlines()[-1] == "requeue 7", completed.stderr


def write_program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {seed: [0], local.lrr: [1, 2]}", "run seed0-lrr1: unknown key local.lrr"),
        ("gird: {seed: [0]}", "unknown key gird (set in"),
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


@pytest.mark.parametrize("name", ["sweep_digits.yaml", "results/lenet.yaml"])
def test_the_included_sweeps_are_valid(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, runs = read_sweep(f"configs/{name}")
    assert len({run.name for run in runs}) == len(runs) >= 6


def test_finished_runs_of_a_sweep_are_not_started_again(tmp_path, capsys):
    file = write_sweep(tmp_path, "grid: {seed: [0, 1]}")
    _, runs = read_sweep(file)
    for run in runs:
        write_run(Path(run.run), rounds=run.rounds)
    assert sweep.main([file, "--local"]) == 0
    assert capsys.readouterr().out == "2 runs: 2 finished, 0 under way, 0 to start\n"


def test_sync_reports_missing_records_and_accounts(tmp_path, capsys, monkeypatch):
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


def test_the_help_of_a_sweep_lists_its_keys() -> None:
    assert list(sweep.SWEEP_KEYS) == list(Sweep.model_fields)
