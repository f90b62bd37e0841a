"""The launchers on a real Slurm cluster of two virtual nodes. All jobs are submitted at once and queued."""

import contextlib
import functools
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from fl_dist.config.sweeps import read_sweep
from fl_dist.main import main
from launch import submit, sweep
from launch.sweep_command import read_statuses
from tests.support import waiting
from tests.support.language_models import GPT2, LORA, run_arguments, write_model
from tests.support.launchers import find_rank_pids, write_config
from tests.support.marks import timing
from tests.support.processes import ROOT
from tests.support.requirements import skip_or_fail
from tests.support.run_folder import count_records, model_hash, newest_saved_round
from tests.support.snippets import snippets
from tests.support.user_guide import install_package, installed_environment, write_files
from tests.support.waiting import Hold, free_port
from tests.support.wandb_records import offline_records, read_entries, select_entries

CLUSTER = ROOT / "tests" / "cluster"
JOB_TIMEOUT_SECONDS = 800.0
"""The time within which a job must end, including its time in the queue."""
pytestmark = [pytest.mark.timeout(900), timing]
wait_for = functools.partial(waiting.wait_for, seconds=JOB_TIMEOUT_SECONDS, every=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """Start a cluster for this module, put it on the PATH, and stop it with all its jobs."""
    problem = "" if os.geteuid() == 0 else "starting Slurm needs root"
    if not problem and not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        problem = "Slurm is not installed (slurmctld, slurmd, munge, slurm-client)"
    with contextlib.ExitStack() as stack:
        if not problem:
            cluster_folder = stack.enter_context(_cluster_folder())
            settings = {"SLURM_PORT": str(free_port(3)), "SLURM_CPUS": "4"}
            up = subprocess.run(
                [CLUSTER / "up", cluster_folder], env=os.environ | settings, capture_output=True, text=True
            )
            problem = up.stderr if up.returncode else ""
        if problem:
            skip_or_fail("slurm", problem)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(contextlib.chdir(ROOT))
        patch.setenv("SLURM_CONF", f"{cluster_folder}/etc/slurm.conf")
        patch.setenv("PATH", f"{cluster_folder}/bin:{os.environ['PATH']}")
        patch.setenv("PYTHON", sys.executable)
        patch.setenv("RANKS", "1")
        yield


@contextlib.contextmanager
def _cluster_folder() -> Iterator[str]:
    """A folder for a cluster; a guard process stops and deletes it when this process ends, however it ends."""
    cluster_folder = tempfile.mkdtemp(prefix="fl")  # short: it contains unix sockets
    script = 'read -r _; [ ! -e "$1/etc/slurm.conf" ] || "$0" "$1"; rm -rf "$1"'
    command_line = ["bash", "-c", script, str(CLUSTER / "down"), cluster_folder]
    guard = subprocess.Popen(command_line, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield cluster_folder
    finally:
        guard.communicate()


class Job:
    """A submitted job, its run folder and its log."""

    def __init__(self, job: str, run: Path, log: Path) -> None:
        self.id, self.run, self.log = job, run, log

    def disturb_after_first_checkpoint(self, disturb: Callable[["Job"], None], hold: Hold | None = None) -> "Job":
        wait_for(
            lambda: count_records(self.run) and newest_saved_round(self.run), f"the first checkpoint of {self.run.name}"
        )
        disturb(self)
        if hold:
            hold.release()
        return self.wait()

    def wait(self) -> "Job":
        active = "PENDING,RUNNING,COMPLETING,REQUEUED,SUSPENDED"
        wait_for(lambda: not squeue("--states", active, "--jobs", self.id), f"the end of {self.run.name}")
        return self

    @property
    def state(self) -> str:
        return squeue("--states=all", "--format=%T", "--jobs", self.id)

    def describe(self) -> str:
        return f"{self.state}\n{self.log.read_text() if self.log.exists() else 'no log'}"


def squeue(*options: str) -> str:
    """Call squeue, again if the controller is too busy."""
    for _ in range(10):
        answer = subprocess.run(["squeue", "--noheader", *options], capture_output=True, text=True)
        if answer.returncode == 0 or "Invalid job id" in answer.stderr:
            break
        time.sleep(1)
    return answer.stdout.strip()


def run_command(*arguments: str) -> None:
    subprocess.run(arguments, check=True, capture_output=True)


def sbatch(name: str, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = (), **env: str) -> Job:
    """Submit a script for two nodes from the folder; `options` override the defaults. The nodes' GPUs are not real."""
    log, run = folder / f"{name}.log", folder / name
    defaults = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--mem=2G", "--time=30", f"--output={log}"]
    arguments = (*arguments, "topology.device=cpu")
    if not any(argument.startswith("run.dir=") for argument in arguments):
        arguments = (*arguments, f"run.dir={run}")
    command_line = ["sbatch", "--parsable", *defaults, *options, str(ROOT / "slurm" / script), *arguments]
    popen_options = {"cwd": folder, "env": os.environ | env}
    return Job(
        subprocess.run(command_line, check=True, capture_output=True, text=True, **popen_options).stdout.strip(),
        run,
        log,
    )


def submit_run(name: str, folder: Path, config: str, *overrides: str, **env: str) -> Job:
    arguments = [config, *overrides, f"run.dir={folder / name}", "--nodes=2", "--tasks-per-node=1"]
    with contextlib.redirect_stdout(io.StringIO()) as output, mock.patch.dict(os.environ, env):
        assert submit.main(arguments) == 0
    fields = dict(command_line.split(maxsplit=1) for command_line in output.getvalue().splitlines())
    return Job(fields["job"], folder / name, Path(fields["follow"].removeprefix("tail -F ")))


def submit_doctor(folder: Path, config: str) -> Job:
    """The doctor on two nodes, in a batch job that it requeues."""
    log, command_line = folder / "doctor.log", f"srun {sys.executable} -m launch.doctor {config} --requeue"
    options = ["--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--time=30", "--requeue", "--open-mode=append"]
    submitted = ["sbatch", "--parsable", *options, f"--output={log}", "--wrap", command_line]
    job = subprocess.run(submitted, check=True, capture_output=True, text=True, cwd=folder).stdout.strip()
    return Job(job, folder / "doctor", log)


def srun(name: str, folder: Path, config: str, *overrides: str) -> Job:
    """Start two ranks on two nodes with srun alone."""
    run_command = [sys.executable, "-m", "fl_dist.main", config, *overrides, f"run.dir={folder / name}"]
    step = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--kill-on-bad-exit=1"]
    result = subprocess.run([*step, *run_command], capture_output=True, text=True)
    (folder / f"{name}.log").write_text(result.stdout + result.stderr)
    return Job("", folder / name, folder / f"{name}.log")


def write_user_project(folder: Path) -> tuple[Path, dict[str, str]]:
    """A folder with only the user's files, and the package installed elsewhere."""
    project, installed = folder / "user", folder / "installed"
    project.mkdir()
    write_files(project)
    install_package(folder / "source", installed)
    return project, installed_environment(installed) | {"SLURM_CONF": os.environ["SLURM_CONF"]}


def adapter_arguments(folder: Path) -> list[str]:
    """Of a run that trains adapters on a tiny language model."""
    model = write_model(folder / "gpt2", GPT2)
    return run_arguments(folder, {"path": str(model), "lora": LORA}, "algorithm=fedsam")


def submit_from(project: Path, env: dict[str, str]) -> Job:
    arguments = ["fl-dist", "submit", "waves.yaml", "run.dir=runs/slurm", "--nodes=2", "--tasks-per-node=1"]
    result = subprocess.run(arguments, cwd=project, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    fields = dict(command_line.split(maxsplit=1) for command_line in result.stdout.splitlines())
    return Job(fields["job"], project / "runs" / "slurm", Path(fields["follow"].removeprefix("tail -F ")))


def write_wrapper(folder: Path) -> Path:
    """A Python wrapper that prints its GPUs and its number of CPUs."""
    file = folder / "python.sh"
    result = "GPUs ${CUDA_VISIBLE_DEVICES-none}, ${SLURM_CPUS_PER_TASK-no} CPUs"
    file.write_text(f'echo "{result}" >&2\nexec {sys.executable} "$@"\n')
    return file


def cancel_when_recorded(job: Job) -> None:
    wait_for(lambda: any(f.stat().st_size for f in job.run.glob("wandb/*/*.wandb")), "a record of W&B")
    run_command("scancel", job.id)


def kill_a_rank(job: Job) -> None:
    os.kill(find_rank_pids(job.run)[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def jobs(slurm, folder) -> Iterator[dict[str, Future[Job]]]:
    """All single jobs, each monitored (and disturbed) by its own thread."""
    config, data = write_config(folder), write_cinic(folder / "cinic")
    offline = "monitor.wandb.mode=offline"
    small = ("rounds=2", "clients.total=10", "clients.per_round=2", "local.epochs=1", "monitor.wandb.mode=disabled")
    files = {"CINIC": str(data / "cinic10.npz")}
    arguments = {
        "PYTHON": f"env WORD=1 {sys.executable}",
        "SETUP": "echo set up; export PLACE=$WHERE",
        "WHERE": str(folder),
    }
    wrapper_env = {"PYTHON": f"bash {write_wrapper(folder)}", "RANKS": "2"}
    tasks = ("--nodes=1", "--gpus-per-node=2", "--gpus-per-task=1", "--ntasks-per-node=2", "--cpus-per-task=1")
    project, env = write_user_project(folder)
    # Rank 0 waits in the sixth round, so that no run finishes before it is disturbed.
    holds = {name: Hold(folder / f"{name}.hold") for name in ("usr2", "requeue", "usr1", "kill")}
    fault_env = {name: {"FL_DIST_FAULT": hold.at("broadcast:6")} for name, hold in holds.items()}
    pool = ThreadPoolExecutor(16)
    try:
        yield {
            "usr2": pool.submit(
                submit_run("usr2", folder, config, offline, **fault_env["usr2"]).disturb_after_first_checkpoint,
                lambda job: run_command("scancel", "--signal=USR2", job.id),
                holds["usr2"],
            ),
            "requeue": pool.submit(
                submit_run("requeue", folder, config, offline, **fault_env["requeue"]).disturb_after_first_checkpoint,
                lambda job: run_command("scontrol", "requeue", job.id),
                holds["requeue"],
            ),
            "usr1": pool.submit(
                sbatch("usr1", folder, "train.sh", config, **fault_env["usr1"]).disturb_after_first_checkpoint,
                lambda job: run_command("scancel", "--batch", "--signal=USR1", job.id),
                holds["usr1"],
            ),
            "kill": pool.submit(
                sbatch("kill", folder, "train.sh", config, **fault_env["kill"]).disturb_after_first_checkpoint,
                kill_a_rank,
                holds["kill"],
            ),
            "cancel": pool.submit(
                sbatch("cancel", folder, "train.sh", config, "rounds=100000", offline).disturb_after_first_checkpoint,
                cancel_when_recorded,
            ),
            "undisturbed": pool.submit(submit_run("undisturbed", folder, config).wait),
            "vit": pool.submit(sbatch("vit", folder, "fedgmt_vit.sh", f"data.root={data}", *small).wait),
            "npz": pool.submit(
                sbatch("npz", folder, "fedgmt_vit.sh", "data.name=npz", "data.path=$CINIC", *small, **files).wait
            ),
            "bad": pool.submit(sbatch("bad", folder, "train.sh", config, "local.lrr=1", options=("--nodes=1",)).wait),
            "adapters": pool.submit(sbatch("adapters", folder, "train.sh", config, *adapter_arguments(folder)).wait),
            "words": pool.submit(
                sbatch("words", folder, "train.sh", config, "rounds=2", "run.dir=$PLACE/words", **arguments).wait
            ),
            "tasks": pool.submit(
                sbatch("tasks", folder, "train.sh", config, "rounds=2", options=tasks, **wrapper_env).wait
            ),
            "lost": pool.submit(sbatch("lost", folder, "train.sh", config, PYTHON="/no/such/python").wait),
            "srun": pool.submit(srun, "srun", folder, config, "rounds=2"),
            "doctor": pool.submit(submit_doctor(folder, config).wait),
            "submitted_doctor": pool.submit(submit_run("submitted_doctor", folder, config, "--doctor").wait),
            "user": pool.submit(submit_from(project, env).wait),
            "user_script": pool.submit(sbatch("script", project, "train.sh", "waves.yaml").wait),
        }
    finally:
        active = squeue("--format=%A").split()
        if active:
            run_command("scancel", *active)  # the monitoring threads end with their jobs
        pool.shutdown()


@pytest.fixture(scope="module")
def arrays(jobs, folder) -> tuple[str, str]:
    """Submit a sweep of six runs, and one whose run fails."""
    config = folder / "digits.yaml"
    head = f"base: {config}\nset: {{rounds: 2}}\nresources: {{tasks_per_node: 2, parallel: 2, hours: 1}}\n"
    six, two = folder / "six.yaml", folder / "two.yaml"
    six.write_text(f"{head}dir: {folder}/six\ngrid: {{algorithm.name: [fedavg, fedgmt], seed: [0, 1, 2]}}\n")
    two.write_text(f"{head}dir: {folder}/two\nlist: [{{label: lost, data: {{name: npz, path: /none.npz}}}}]\n")
    for file in (six, two):
        assert sweep.main([str(file)]) == 0
    return str(six), str(two)


def write_cinic(folder: Path) -> Path:
    """Data like CINIC-10, with 100 training and 20 test images."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    y_train, y_test = np.arange(100) % 10, np.arange(20) % 10
    images = [rng.integers(0, 256, (len(y), 3, 32, 32), np.uint8) for y in (y_train, y_test)]
    np.savez(folder / "cinic10.npz", x_train=images[0], y_train=y_train, x_test=images[1], y_test=y_test)
    return folder


@pytest.mark.parametrize("name", ["usr2", "requeue", "usr1", "kill"])
def test_a_disturbed_run_gives_the_model_of_an_undisturbed_one(name, jobs):
    plain, disturbed = jobs["undisturbed"].result(), jobs[name].result()
    assert plain.state == "COMPLETED", plain.describe()
    assert disturbed.state == "COMPLETED", disturbed.describe()
    assert disturbed.log.read_text().count("server + 1 worker") == 2, disturbed.describe()  # it started twice
    assert disturbed.log.read_text().count("resuming after round") == 1, disturbed.describe()
    assert model_hash(disturbed.run) == model_hash(plain.run)


@pytest.mark.parametrize("name", ["usr2", "requeue"])
def test_a_requeued_run_is_one_wandb_run(name, jobs):
    run = jobs[name].result().run
    records = offline_records(run)  # an attempt that ended before W&B started has none
    assert {record.name.split("-")[-1] for record in records} == {(run / "wandb" / "id").read_text()}
    assert len(select_entries("history", read_entries(records[-1]))) == count_records(run)


def test_the_script_for_fedgmt_runs_on_two_nodes(jobs):
    job = jobs["vit"].result()
    assert job.state == "COMPLETED", job.describe()
    assert "vit_cifar with 1,825,162 parameters" in job.log.read_text()
    assert {log.name for log in (job.run / "logs").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    assert (job.run / "model.safetensors").exists()


def test_a_cancelled_job_is_saved_and_not_requeued(jobs):
    job = jobs["cancel"].result()
    assert job.state == "CANCELLED", job.describe()
    assert "goes back to the queue" not in job.log.read_text()
    assert "Traceback" not in job.log.read_text(), job.describe()
    assert any((job.run / "checkpoint").iterdir())
    assert "Traceback" not in (job.run / "logs" / "wandb.log").read_text(), job.describe()
    assert "W&B" not in job.log.read_text(), job.describe()
    records = read_entries(offline_records(job.run)[-1])
    assert len(select_entries("history", records)) == count_records(job.run)
    assert records[-1]["type"] == "exit"


def test_a_bad_config_fails_with_one_line_in_the_log(jobs):
    job = jobs["bad"].result()
    assert job.state == "FAILED"
    errors = [command_line for command_line in job.log.read_text().splitlines() if command_line.startswith("error: ")]
    assert errors == ["error: unknown key local.lrr (set on the command line); did you mean 'lr'?"]
    assert "Traceback" not in job.log.read_text()


@pytest.fixture(scope="module")
def reference_hash(folder) -> str:
    """The hash of the model that one process trains."""
    assert main([write_config(folder), "rounds=2", f"run.dir={folder / 'alone'}"]) == 0
    return model_hash(folder / "alone")


def test_srun_alone_starts_connected_ranks(jobs, reference_hash):
    job = jobs["srun"].result()
    assert "server + 1 worker on" in job.log.read_text(), job.log.read_text()
    assert model_hash(job.run) == reference_hash


@pytest.mark.parametrize("name", ["doctor", "submitted_doctor"])
def test_the_doctor_checks_two_nodes(name, jobs):
    job = jobs[name].result()
    assert job.state == "COMPLETED", job.describe()
    log = job.log.read_text()
    passed = [
        r"lock .* seen by others on every node",
        r"same bits .* 2 ranks, twice each",
        r"killed worker .*rank 1 was named",
    ]
    passed += [r"Slurm's signals .*SIGUSR1 reached every rank"]
    passed += [r"Slurm's requeue .*started again"] if name == "doctor" else []
    assert [row for row in passed if not re.search(f"^ok .*{row}", log, re.MULTILINE)] == [], log
    assert "failed" not in log


def test_a_job_script_works_in_any_folder_with_any_python(jobs, reference_hash):
    job = jobs["words"].result()
    assert job.state == "COMPLETED", job.describe()
    assert job.log.read_text().startswith("set up\n")
    assert model_hash(job.run) == reference_hash


def test_the_launcher_of_a_node_gets_the_gpus_of_all_tasks(jobs, reference_hash):
    job = jobs["tasks"].result()
    assert job.state == "COMPLETED", job.describe()
    assert "GPUs 0,1, 2 CPUs\n" in job.log.read_text(), job.describe()
    assert model_hash(job.run) == reference_hash


@pytest.mark.parametrize("name", ["user", "user_script"])
def test_user_modules_are_importable_on_every_node(name, jobs, folder):
    job = jobs[name].result()
    assert job.state == "COMPLETED", job.describe()
    single_process = folder / "user" / "alone"
    if not single_process.exists():
        run_command(
            sys.executable, "-m", "fl_dist.main", str(folder / "user" / "waves.yaml"), f"run.dir={single_process}"
        )
    assert model_hash(job.run) == model_hash(single_process)


def test_a_job_script_without_python_names_the_variables_to_set(jobs):
    job = jobs["lost"].result()
    assert job.state == "FAILED"
    (error,) = [command_line for command_line in job.log.read_text().splitlines() if command_line.startswith("error: ")]
    assert "'/no/such/python' is no Python with fl_dist's packages" in error
    assert "set PYTHON" in error and "SETUP" in error


def test_adapters_have_the_bits_of_one_process_on_two_nodes(jobs, folder):
    job, alone = jobs["adapters"].result(), folder / "adapters-alone"
    assert job.state == "COMPLETED", job.describe()
    assert main([str(folder / "digits.yaml"), *adapter_arguments(folder), f"run.dir={alone}"]) == 0
    assert model_hash(job.run) == model_hash(alone)
    written = [run / "adapter" / "adapter_model.safetensors" for run in (job.run, alone)]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_the_script_for_fedgmt_accepts_other_data(jobs):
    job = jobs["npz"].result()
    assert job.state == "COMPLETED", job.describe()
    assert "fedgmt · npz · vit_cifar" in job.log.read_text()


@pytest.mark.parametrize("command_line", [c for s in snippets("sh") for c in s.commands() if "sbatch " in c])
def test_slurm_accepts_the_documented_commands(command_line, slurm):
    """With the resources of this cluster."""
    small = command_line.replace(
        " slurm/", " --test-only --gpus-per-node=1 --cpus-per-task=1 --mem=1G --array=0 slurm/"
    )
    result = subprocess.run(["bash", "-c", small], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "to start at" in result.stderr


def test_an_array_completes_with_correct_status(arrays, capsys):
    six, _ = arrays
    capsys.readouterr()
    wait_for_array(six)
    assert sweep.main([six, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    names = [f"{algorithm}-seed{seed}" for algorithm in ("fedavg", "fedgmt") for seed in range(3)]
    assert [command_line.split()[:3] for command_line in lines] == [[name, "finished", "2/2"] for name in names]
    assert all(re.search(r"\d+\.\d\d %", command_line) for command_line in lines)
    assert sweep.main([six]) == 0
    assert capsys.readouterr().out == "6 runs: 6 finished, 0 under way, 0 to start\n"


def test_the_status_shows_why_a_run_failed(arrays, capsys):
    _, two = arrays
    wait_for_array(two)
    capsys.readouterr()
    assert sweep.main([two, "--status"]) == 0
    assert re.match(r"lost +failed +data file /none.npz does not exist", capsys.readouterr().out.splitlines()[1])


def wait_for_array(file: str) -> None:
    _, runs = read_sweep(file)
    ended = ("finished", "failed")
    wait_for(lambda: all(status.state in ended for status in read_statuses(runs)), f"the end of {file}")
