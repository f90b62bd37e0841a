"""The checks in their order. Every rank runs this; rank 0 has the results."""

import contextlib
import fcntl
import functools
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.common.errors import FlDistError, error_message
from fl_dist.common.files import write_atomically
from fl_dist.common.formatting import pluralize
from fl_dist.common.paths import expand_path
from fl_dist.config import Config
from fl_dist.distributed.process_group import has_dedicated_server, hostname
from fl_dist.distributed.rank_info import RankInfo
from fl_dist.doctor import data, devices, disk, memory, network, slurm, steps, trials, versions, wandb
from fl_dist.doctor.checks import Check, Report, Status, find_error
from fl_dist.doctor.jobs import Outcome, prepare_children, run_job
from fl_dist.doctor.probe import ProbeArguments, compile_probe, probe
from fl_dist.doctor.ranks import CONNECT_TIMEOUT_SECONDS, Ranks
from fl_dist.storage.folder_lock import LOCK

PROBE_TIMEOUT_SECONDS = 120.0
COMPILE_TIMEOUT_SECONDS = 180.0
FOLDER_PREFIX = ".fl_dist-doctor-"
MODEL = "model"

Progress = Callable[[str], None]


class Options(NamedTuple):
    """What to examine."""

    config: Config
    words: list[str]
    """File and overrides of the configuration."""
    rank_info: RankInfo | None
    requeue: bool = False
    compile: bool = False


class RanksMissingError(FlDistError):
    """Not all ranks found each other."""

    def __init__(self, check: Check) -> None:
        super().__init__(f"{check.measured}; {check.advice}")
        self.check = check


def examine(options: Options, progress: Progress) -> list[Check]:
    """All checks; none on other ranks than 0."""
    address = _resolve(options.rank_info)
    ranks = Ranks(options.rank_info)
    checks = _check_ranks(ranks, address)
    checks += slurm.check_requeue(ranks) if options.requeue else []
    prepare_children()
    with _work_folder(ranks, expand_path(str(options.config.run.dir)).parent) as (folder, disk_checks):
        progress("measuring devices, network and model")
        checks += [*disk_checks, *_probe(options, ranks, folder)]
        if ranks.broadcast(_can_train(checks)):
            checks += _run_trials(options, ranks, folder, progress)
        checks += slurm.check_signals(ranks)
    ranks.gather("done", CONNECT_TIMEOUT_SECONDS)  # rank 0 has the store, and leaves last
    return checks if ranks.rank == 0 else []


def _resolve(rank_info: RankInfo | None) -> dict[str, Any]:
    """The address of rank 0; a rank that has none cannot tell rank 0, and so says it itself."""
    address = network.resolve(rank_info.host if rank_info else "127.0.0.1")
    if "error" in address and rank_info is not None and not rank_info.is_single_node:
        raise RanksMissingError(network.check_address([Report(rank_info.rank, hostname(), address)]))
    return address


def _check_ranks(ranks: Ranks, address: dict[str, Any]) -> list[Check]:
    """Wait for all ranks; then all know the host of each."""
    answers = ranks.gather({"host": hostname(), "address": address}, CONNECT_TIMEOUT_SECONDS)
    if missing := [str(rank) for rank, answer in enumerate(answers) if answer is None]:
        measured = f"rank {', '.join(missing)} of {ranks.size} did not come within {CONNECT_TIMEOUT_SECONDS:.0f} s"
        advice = "see the output of these ranks; check that they can reach rank 0's node"
        raise RanksMissingError(Check("ranks", Status.FAILED, measured, advice))
    ranks.hosts = ranks.broadcast([answer["host"] for answer in answers])
    reports = [Report(rank, answer["host"], answer["address"]) for rank, answer in enumerate(answers)]
    return [network.check_address(reports)] if ranks.rank == 0 else []


@contextlib.contextmanager
def _work_folder(ranks: Ranks, parent: Path) -> Iterator[tuple[Path, list[Check]]]:
    """A folder on the disk of the run folder, for files and runs of the doctor; elsewhere if that is impossible."""
    while not parent.exists():
        parent = parent.parent
    name, checks = f"{FOLDER_PREFIX}{secrets.token_hex(4)}", list[Check]()
    folders = [parent.absolute() / name, Path(tempfile.gettempdir(), name)]
    try:
        if ranks.rank == 0:
            checks = [disk.check_disk(_try_folder(folders[0]), folders[0].parent)]
            if checks[0].status is Status.FAILED:
                folders.reverse()
                folders[0].mkdir(mode=0o700, exist_ok=True)
        yield Path(ranks.broadcast(str(folders[0]))), checks
    finally:
        if ranks.rank == 0:  # also after a signal, at any moment
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)


def _try_folder(folder: Path) -> dict[str, Any]:
    try:
        folder.mkdir(mode=0o700)
        return disk.measure_disk(folder)
    except OSError as e:
        return {"error": error_message(e)}


def _probe(options: Options, ranks: Ranks, folder: Path) -> list[Check]:
    """What each rank measures in a child process, and what rank 0's node has."""
    token = ranks.broadcast(secrets.token_hex(8))
    arguments = ProbeArguments(options.words, str(folder), token)
    with _locked_marker(folder, token) if ranks.rank == 0 else contextlib.nullcontext():
        outcomes = run_job(ranks, ranks.size, probe, arguments, PROBE_TIMEOUT_SECONDS)
    compiled = run_job(ranks, 1, compile_probe, arguments, COMPILE_TIMEOUT_SECONDS) if options.compile else []
    if ranks.rank != 0:
        return []
    checks = _check_reports(options.config, ranks, outcomes, folder)
    checks.append(wandb.check_wandb(options.config.monitor.wandb.mode))
    return checks + [steps.check_compiled(report) for report in _reports(ranks, compiled, "compiled")]


@contextlib.contextmanager
def _locked_marker(folder: Path, token: str) -> Iterator[None]:
    """Within it, this process holds the lock of the folder, as a run does."""
    write_atomically(folder / disk.MARKER, token.encode())
    with open(folder / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _reports(ranks: Ranks, outcomes: Sequence[Outcome], subject: str) -> list[Report]:
    """What each rank measured of a subject, or why it did not."""
    problems = [{"error": outcome.problem or "not measured"} for outcome in outcomes]
    values = [outcome.result.get(subject, problem) for outcome, problem in zip(outcomes, problems, strict=True)]
    return [Report(rank, ranks.hosts[rank], each) for rank, each in enumerate(values)]


def _check_reports(config: Config, ranks: Ranks, outcomes: Sequence[Outcome], folder: Path) -> list[Check]:
    reports = functools.partial(_reports, ranks, outcomes)
    found, is_dedicated = reports("devices"), has_dedicated_server(config.topology, ranks.size)
    checks = [
        versions.check_versions(reports("versions"), uses_gpus=config.topology.device != "cpu"),
        disk.check_lock(reports("folder"), folder),
        devices.check_devices(found, config.topology.threads, is_dedicated),
    ]
    if any("error" in report.values for report in found):
        return checks
    checks += [*devices.check_links(found), *devices.check_copies(found)]
    checks += network.check_collectives(reports("collectives"))
    checks.append(data.check_data(reports("data"), config.data["name"]))
    return checks if checks[-1].status is Status.FAILED else [*checks, *_check_model(config, reports, is_dedicated)]


def _check_model(config: Config, reports: Callable[[str], list[Report]], is_dedicated: bool) -> list[Check]:
    if failed := find_error(MODEL, reports("experiment"), "fl-dist run --check CONFIG checks it without training"):
        return [failed]
    return [
        steps.check_step(reports("step")[int(is_dedicated) :]),
        steps.check_variants(reports("variants")[-1], config.local.precision),
        memory.check_memory(reports("memory"), is_dedicated),
    ]


def _can_train(checks: Sequence[Check]) -> bool:
    """Whether short runs can show something new: a local step worked, and all ranks see the folder."""
    working = {check.name for check in checks if check.status is not Status.FAILED}
    return {steps.NAME, disk.LOCK} <= working


def _run_trials(options: Options, ranks: Ranks, folder: Path, progress: Progress) -> list[Check]:
    found = [_run_trial(options, ranks, folder, size, progress) for size in trials.trial_sizes(ranks.size)]
    progress("killing a worker in mid-round, resuming")
    words = trials.trial_words(options.words, options.config, folder / "killed")
    fault = f"reduce:{trials.trial_rounds(options.config)}@{ranks.size - 1}"
    killed = run_job(ranks, ranks.size, trials.train, [words], trials.TRIAL_TIMEOUT_SECONDS, fault)
    resumed = run_job(ranks, ranks.size, trials.train, [words], trials.TRIAL_TIMEOUT_SECONDS)
    if ranks.rank != 0:
        return []
    bits = trials.check_bits(found)
    sha256, expected = trials.model_hash(folder / "killed"), found[0].hashes[0]
    return [bits] if bits.status is Status.FAILED else [bits, trials.check_killed(killed, resumed, sha256, expected)]


def _run_trial(options: Options, ranks: Ranks, folder: Path, size: int, progress: Progress) -> trials.Trial:
    progress(f"two short runs on {pluralize(size, 'rank')}")
    runs = [folder / f"{size}-{number}" for number in range(trials.REPEATS)]
    words = [trials.trial_words(options.words, options.config, run) for run in runs]
    outcomes = run_job(ranks, size, trials.train, words, trials.TRIAL_TIMEOUT_SECONDS)
    return trials.Trial(size, [trials.model_hash(run) for run in runs], trials.first_problem(outcomes))
