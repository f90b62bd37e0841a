"""The launchers on a real Slurm of two virtual nodes. Everything is submitted at once; the queue keeps it in bounds."""

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

from fl_dist.main import main
from launch import submit, sweep
from tests.support import waiting
from tests.support.launchers import ranks, write_config
from tests.support.marks import timing
from tests.support.processes import ROOT
from tests.support.requirements import lacking
from tests.support.run_folder import model_hash, rows, saved
from tests.support.snippets import snippets
from tests.support.user_guide import install, variables, write_files
from tests.support.waiting import Hold, free_port
from tests.support.wandb_records import entries, of, records

CLUSTER = ROOT / "tests" / "cluster"
PATIENCE = 800.0
"""Seconds within which a job must end, waiting in the queue included."""
pytestmark = [pytest.mark.timeout(900), timing]
wait_for = functools.partial(waiting.wait_for, seconds=PATIENCE, every=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("slurm")


@pytest.fixture(scope="module")
def slurm() -> Iterator[None]:
    """A cluster for the tests of this module: up, on the PATH, and down with everything that runs on it."""
    problem = "" if os.geteuid() == 0 else "starting Slurm needs root"
    if not problem and not all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        problem = "Slurm is not installed (slurmctld, slurmd, munge, slurm-client)"
    with contextlib.ExitStack() as stack:
        if not problem:
            place = stack.enter_context(_place())
            settings = {"SLURM_PORT": str(free_port(3)), "SLURM_CPUS": "4"}
            up = subprocess.run([CLUSTER / "up", place], env=os.environ | settings, capture_output=True, text=True)
            problem = up.stderr if up.returncode else ""
        if problem:
            lacking("slurm", problem)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(contextlib.chdir(ROOT))
        patch.setenv("SLURM_CONF", f"{place}/etc/slurm.conf")
        patch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
        patch.setenv("PYTHON", sys.executable)
        patch.setenv("RANKS", "1")
        yield


@contextlib.contextmanager
def _place() -> Iterator[str]:
    """A folder for a cluster, which a guard stops and deletes when this process ends, in whatever way."""
    place = tempfile.mkdtemp(prefix="fl")  # short: unix sockets lie below it
    script = 'read -r _; [ ! -e "$1/etc/slurm.conf" ] || "$0" "$1"; rm -rf "$1"'
    line = ["bash", "-c", script, str(CLUSTER / "down"), place]
    guard = subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield place
    finally:
        guard.communicate()


class Job:
    """A submitted job, its run folder and its log."""

    def __init__(self, job: str, run: Path, log: Path) -> None:
        self.id, self.run, self.log = job, run, log

    def after_a_round(self, disturb: Callable[["Job"], None], hold: Hold | None = None) -> "Job":
        wait_for(lambda: rows(self.run) and saved(self.run), f"the first save of {self.run.name}")
        disturb(self)
        if hold:
            hold.release()
        return self.ended()

    def ended(self) -> "Job":
        active = "PENDING,RUNNING,COMPLETING,REQUEUED,SUSPENDED"
        wait_for(lambda: not squeue("--states", active, "--jobs", self.id), f"the end of {self.run.name}")
        return self

    @property
    def state(self) -> str:
        return squeue("--states=all", "--format=%T", "--jobs", self.id)

    def shown(self) -> str:
        return f"{self.state}\n{self.log.read_text() if self.log.exists() else 'no log'}"


def squeue(*options: str) -> str:
    """A controller that is busy may not answer in time."""
    for _ in range(10):
        asked = subprocess.run(["squeue", "--noheader", *options], capture_output=True, text=True)
        if asked.returncode == 0 or "Invalid job id" in asked.stderr:
            break
        time.sleep(1)
    return asked.stdout.strip()


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def sbatch(name: str, folder: Path, *words: str, options: tuple[str, ...] = (), **env: str) -> Job:
    """Options come after these; a script of two nodes, submitted from the folder."""
    log, run = folder / f"{name}.log", folder / name
    usual = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2", "--time=30", f"--output={log}"]
    script, *arguments = words
    if not any(word.startswith("run.dir=") for word in arguments):
        arguments.append(f"run.dir={run}")
    line = ["sbatch", "--parsable", *usual, *options, str(ROOT / "slurm" / script), *arguments]
    given = {"cwd": folder, "env": os.environ | env}
    return Job(subprocess.run(line, check=True, capture_output=True, text=True, **given).stdout.strip(), run, log)


def submitted(name: str, folder: Path, config: str, *overrides: str, **env: str) -> Job:
    words = [config, *overrides, f"run.dir={folder / name}", "--nodes=2", "--tasks-per-node=1"]
    with contextlib.redirect_stdout(io.StringIO()) as output, mock.patch.dict(os.environ, env):
        assert submit.main(words) == 0
    found = dict(line.split(maxsplit=1) for line in output.getvalue().splitlines())
    return Job(found["job"], folder / name, Path(found["follow"].removeprefix("tail -F ")))


def srun(name: str, folder: Path, config: str, *overrides: str) -> Job:
    """Two ranks on two nodes, with nothing but srun."""
    command = [sys.executable, "-m", "fl_dist.main", config, *overrides, f"run.dir={folder / name}"]
    step = ["srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=1", "--kill-on-bad-exit=1"]
    done = subprocess.run([*step, *command], capture_output=True, text=True)
    (folder / f"{name}.log").write_text(done.stdout + done.stderr)
    return Job("", folder / name, folder / f"{name}.log")


def own(folder: Path) -> tuple[Path, dict[str, str]]:
    """A folder with nothing but the reader's own files, and the package installed elsewhere."""
    desk, installed = folder / "own", folder / "installed"
    desk.mkdir()
    write_files(desk)
    install(folder / "source", installed)
    kept = {name: os.environ[name] for name in ("SLURM_CONF",)}
    return desk, variables(installed) | kept


def submitted_from(desk: Path, env: dict[str, str]) -> Job:
    words = ["fl-dist", "submit", "waves.yaml", "run.dir=runs/slurm", "--nodes=2", "--tasks-per-node=1"]
    shown = subprocess.run(words, cwd=desk, env=env, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    found = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    return Job(found["job"], desk / "runs" / "slurm", Path(found["follow"].removeprefix("tail -F ")))


def write_wrapper(folder: Path) -> Path:
    """A Python that shows which GPUs and how many CPUs it has."""
    file = folder / "python.sh"
    shown = "GPUs ${CUDA_VISIBLE_DEVICES-none}, ${SLURM_CPUS_PER_TASK-no} CPUs"
    file.write_text(f'echo "{shown}" >&2\nexec {sys.executable} "$@"\n')
    return file


def cancel_when_mirrored(job: Job) -> None:
    wait_for(lambda: any(f.stat().st_size for f in job.run.glob("wandb/*/*.wandb")), "a record of W&B")
    command("scancel", job.id)


def kill_a_rank(job: Job) -> None:
    os.kill(ranks(job.run)[0], signal.SIGKILL)


@pytest.fixture(scope="module")
def jobs(slurm, folder) -> Iterator[dict[str, Future[Job]]]:
    """All single jobs, each watched (and disturbed) by a thread of its own."""
    config, data = write_config(folder), cinic(folder / "cinic")
    offline = "monitor.wandb.mode=offline"
    small = ("rounds=2", "clients.total=10", "clients.per_round=2", "local.epochs=1", "monitor.wandb.mode=disabled")
    files = {"CINIC": str(data / "cinic10.npz")}
    words = {
        "PYTHON": f"env WORD=1 {sys.executable}",
        "SETUP": "echo set up; export PLACE=$WHERE",
        "WHERE": str(folder),
    }
    shows = {"PYTHON": f"bash {write_wrapper(folder)}", "RANKS": "2"}
    tasks = ("--nodes=1", "--gpus-per-node=2", "--gpus-per-task=1", "--ntasks-per-node=2", "--cpus-per-task=1")
    desk, env = own(folder)
    # Rank 0 waits after some rounds: no run is over before somebody disturbs it.
    holds = {name: Hold(folder / f"{name}.hold") for name in ("usr2", "requeue", "usr1", "kill")}
    held = {name: {"FL_DIST_FAULT": hold.at("broadcast:6")} for name, hold in holds.items()}
    pool = ThreadPoolExecutor(16)
    try:
        yield {
            "usr2": pool.submit(
                submitted("usr2", folder, config, offline, **held["usr2"]).after_a_round,
                lambda job: command("scancel", "--signal=USR2", job.id),
                holds["usr2"],
            ),
            "requeue": pool.submit(
                submitted("requeue", folder, config, offline, **held["requeue"]).after_a_round,
                lambda job: command("scontrol", "requeue", job.id),
                holds["requeue"],
            ),
            "usr1": pool.submit(
                sbatch("usr1", folder, "train.sh", config, **held["usr1"]).after_a_round,
                lambda job: command("scancel", "--batch", "--signal=USR1", job.id),
                holds["usr1"],
            ),
            "kill": pool.submit(
                sbatch("kill", folder, "train.sh", config, **held["kill"]).after_a_round, kill_a_rank, holds["kill"]
            ),
            "cancel": pool.submit(
                sbatch("cancel", folder, "train.sh", config, "rounds=100000", offline).after_a_round,
                cancel_when_mirrored,
            ),
            "undisturbed": pool.submit(submitted("undisturbed", folder, config).ended),
            "vit": pool.submit(sbatch("vit", folder, "fedgmt_vit.sh", f"data.root={data}", *small).ended),
            "npz": pool.submit(
                sbatch("npz", folder, "fedgmt_vit.sh", "data.name=npz", "data.path=$CINIC", *small, **files).ended
            ),
            "bad": pool.submit(sbatch("bad", folder, "train.sh", config, "local.lrr=1", options=("--nodes=1",)).ended),
            "words": pool.submit(
                sbatch("words", folder, "train.sh", config, "rounds=2", "run.dir=$PLACE/words", **words).ended
            ),
            "tasks": pool.submit(sbatch("tasks", folder, "train.sh", config, "rounds=2", options=tasks, **shows).ended),
            "lost": pool.submit(sbatch("lost", folder, "train.sh", config, PYTHON="/no/such/python").ended),
            "srun": pool.submit(srun, "srun", folder, config, "rounds=2"),
            "own": pool.submit(submitted_from(desk, env).ended),
            "own_script": pool.submit(sbatch("script", desk, "train.sh", "waves.yaml").ended),
        }
    finally:
        active = squeue("--format=%A").split()
        if active:
            command("scancel", *active)  # the watching threads end with their jobs
        pool.shutdown()


@pytest.fixture(scope="module")
def arrays(jobs, folder) -> tuple[str, str]:
    """A sweep of six runs, and one of two that cannot work, submitted."""
    config = folder / "digits.yaml"
    head = f"base: {config}\nset: {{rounds: 2}}\nresources: {{tasks_per_node: 2, parallel: 2, hours: 1}}\n"
    six, two = folder / "six.yaml", folder / "two.yaml"
    six.write_text(f"{head}dir: {folder}/six\ngrid: {{algorithm.name: [fedavg, fedgmt], seed: [0, 1, 2]}}\n")
    two.write_text(f"{head}dir: {folder}/two\nlist: [{{label: lost, data: {{name: npz, path: /none.npz}}}}]\n")
    for file in (six, two):
        assert sweep.main([str(file)]) == 0
    return str(six), str(two)


def cinic(folder: Path) -> Path:
    """As CINIC-10, with 100 images to train and 20 to test."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    y_train, y_test = np.arange(100) % 10, np.arange(20) % 10
    images = [rng.integers(0, 256, (len(y), 3, 32, 32), np.uint8) for y in (y_train, y_test)]
    np.savez(folder / "cinic10.npz", x_train=images[0], y_train=y_train, x_test=images[1], y_test=y_test)
    return folder


@pytest.mark.parametrize("name", ["usr2", "requeue", "usr1", "kill"])
def test_a_disturbed_run_ends_with_the_model_of_an_undisturbed_one(name, jobs):
    plain, disturbed = jobs["undisturbed"].result(), jobs[name].result()
    assert plain.state == "COMPLETED", plain.shown()
    assert disturbed.state == "COMPLETED", disturbed.shown()
    assert disturbed.log.read_text().count("server + 1 worker") == 2, disturbed.shown()  # it was started twice
    assert disturbed.log.read_text().count("resuming after round") == 1, disturbed.shown()
    assert model_hash(disturbed.run) == model_hash(plain.run)


@pytest.mark.parametrize("name", ["usr2", "requeue"])
def test_a_requeued_run_stays_one_wandb_run(name, jobs):
    run = jobs[name].result().run
    found = records(run)  # an attempt that ended before W&B had started has none
    assert {record.name.split("-")[-1] for record in found} == {(run / "wandb" / "id").read_text()}
    assert len(of("history", entries(found[-1]))) == rows(run)


def test_the_script_for_fedgmt_runs_on_two_nodes(jobs):
    job = jobs["vit"].result()
    assert job.state == "COMPLETED", job.shown()
    assert "vit_cifar with 1,825,162 parameters" in job.log.read_text()
    assert {log.name for log in (job.run / "logs").glob("rank*.log")} == {"rank0.log", "rank1.log"}
    assert (job.run / "model.safetensors").exists()


def test_a_cancelled_job_is_saved_and_does_not_come_back(jobs):
    job = jobs["cancel"].result()
    assert job.state == "CANCELLED", job.shown()
    assert "goes back to the queue" not in job.log.read_text()
    assert "Traceback" not in job.log.read_text(), job.shown()
    assert any((job.run / "checkpoint").iterdir())
    assert "Traceback" not in (job.run / "logs" / "wandb.log").read_text(), job.shown()
    assert "W&B" not in job.log.read_text(), job.shown()
    found = entries(records(job.run)[-1])
    assert len(of("history", found)) == rows(job.run)
    assert found[-1]["type"] == "exit"


def test_a_bad_config_fails_with_one_line_in_the_log(jobs):
    job = jobs["bad"].result()
    assert job.state == "FAILED"
    errors = [line for line in job.log.read_text().splitlines() if line.startswith("error: ")]
    assert errors == ["error: unknown key local.lrr (set in the command line); did you mean 'lr'?"]
    assert "Traceback" not in job.log.read_text()


@pytest.fixture(scope="module")
def two_rounds(folder) -> str:
    """The model that one process makes."""
    assert main([write_config(folder), "rounds=2", f"run.dir={folder / 'alone'}"]) == 0
    return model_hash(folder / "alone")


def test_srun_alone_starts_ranks_that_find_each_other(jobs, two_rounds):
    job = jobs["srun"].result()
    assert "server + 1 worker on" in job.log.read_text(), job.log.read_text()
    assert model_hash(job.run) == two_rounds


def test_a_script_finds_its_way_from_any_folder_with_any_python(jobs, two_rounds):
    job = jobs["words"].result()
    assert job.state == "COMPLETED", job.shown()
    assert job.log.read_text().startswith("set up\n")
    assert model_hash(job.run) == two_rounds


def test_one_launcher_gets_the_gpus_of_all_tasks(jobs, two_rounds):
    job = jobs["tasks"].result()
    assert job.state == "COMPLETED", job.shown()
    assert "GPUs 0,1, 2 CPUs\n" in job.log.read_text(), job.shown()
    assert model_hash(job.run) == two_rounds


@pytest.mark.parametrize("name", ["own", "own_script"])
def test_what_is_the_users_own_is_found_on_every_node(name, jobs, folder):
    job = jobs[name].result()
    assert job.state == "COMPLETED", job.shown()
    alone = folder / "own" / "alone"
    if not alone.exists():
        command(sys.executable, "-m", "fl_dist.main", str(folder / "own" / "waves.yaml"), f"run.dir={alone}")
    assert model_hash(job.run) == model_hash(alone)


def test_a_script_without_python_says_what_to_set(jobs):
    job = jobs["lost"].result()
    assert job.state == "FAILED"
    (error,) = [line for line in job.log.read_text().splitlines() if line.startswith("error: ")]
    assert "'/no/such/python' is no Python with fl_dist's packages" in error
    assert "set PYTHON" in error and "SETUP" in error


def test_the_script_for_fedgmt_takes_other_data(jobs):
    job = jobs["npz"].result()
    assert job.state == "COMPLETED", job.shown()
    assert "fedgmt · npz · vit_cifar" in job.log.read_text()


@pytest.mark.parametrize("line", [c for s in snippets("sh") for c in s.commands() if "sbatch " in c])
def test_slurm_accepts_what_the_documents_submit(line, slurm):
    """With the size of this cluster instead of a real one's."""
    small = line.replace(" slurm/", " --test-only --gpus-per-node=1 --cpus-per-task=1 --array=0 slurm/")
    shown = subprocess.run(["bash", "-c", small], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "to start at" in shown.stderr


def test_an_array_completes_and_its_status_is_right(arrays, capsys):
    six, _ = arrays
    capsys.readouterr()
    wait_for_array(six)
    assert sweep.main([six, "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    names = [f"{algorithm}-seed{seed}" for algorithm in ("fedavg", "fedgmt") for seed in range(3)]
    assert [line.split()[:3] for line in lines] == [[name, "finished", "2/2"] for name in names]
    assert all(re.search(r"\d+\.\d\d %", line) for line in lines)
    assert sweep.main([six]) == 0
    assert capsys.readouterr().out == "6 runs: 6 finished, 0 under way, 0 to start\n"


def test_the_status_says_why_a_run_failed(arrays, capsys):
    _, two = arrays
    wait_for_array(two)
    capsys.readouterr()
    assert sweep.main([two, "--status"]) == 0
    assert re.match(r"lost +failed +data file /none.npz does not exist", capsys.readouterr().out.splitlines()[1])


def wait_for_array(file: str) -> None:
    _, cells = sweep.read(file)
    ended = ("finished", "failed")
    wait_for(lambda: all(line.state in ended for line in sweep.statuses(cells)), f"the end of {file}")
