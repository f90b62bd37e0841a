"""What the doctor measures on each rank, in a child process: everything that touches devices, data or the model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fl_dist.config import Config
from fl_dist.config.arguments import resolve_arguments
from fl_dist.distributed.devices import pick_device
from fl_dist.distributed.failures import error_line
from fl_dist.distributed.memory import keep_freed_memory
from fl_dist.distributed.process_group import connect, has_dedicated_server
from fl_dist.distributed.rank_info import SINGLE_PROCESS, RankInfo, find_rank
from fl_dist.distributed.signals import StopRequest
from fl_dist.distributed.torch_settings import torch_settings
from fl_dist.doctor.data import measure_data
from fl_dist.doctor.devices import measure_device
from fl_dist.doctor.disk import measure_folder
from fl_dist.doctor.jobs import write_result
from fl_dist.doctor.memory import measure_memory
from fl_dist.doctor.network import measure_collectives
from fl_dist.doctor.steps import measure_compiled, measure_step, measure_variants, supported_precisions
from fl_dist.doctor.versions import measure_versions
from fl_dist.federation.experiment import Experiment

CONNECT_TIMEOUT_SECONDS = 90.0


class ProbeArguments(NamedTuple):
    words: list[str]
    """File and overrides of the configuration."""
    folder: str
    token: str
    """What the marker in the folder holds."""


def probe(file: Path, arguments: ProbeArguments) -> int:
    """Measure one subject after the other; what fails has an error instead of values."""
    config, _ = resolve_arguments(arguments.words)
    rank_info, results = find_rank(), dict[str, Any]()
    info = rank_info or SINGLE_PROCESS

    def measure(subject: str, function: Callable[[], Any]) -> Any:
        """Its value; the result file has it too, or the error."""
        try:
            value = function()
            results[subject] = value if isinstance(value, dict) else {}
        except Exception as e:
            value, results[subject] = None, {"error": error_line(e)}
        write_result(file, results)
        return value

    keep_freed_memory()
    measure("folder", lambda: measure_folder(Path(arguments.folder), arguments.token))
    measure("versions", measure_versions)
    device = measure("devices", lambda: pick_device(config.topology, info.local_rank))
    if device is None:
        return 0
    precisions = measure("precisions", lambda: supported_precisions(config, device))
    with torch_settings(config):
        measure("devices", lambda: measure_device(device))
        measure("collectives", lambda: _connect_and_measure(config, rank_info))
        measure("data", lambda: measure_data(config))
        experiment = measure("experiment", lambda: Experiment(config, device))
        if experiment is not None:
            measure("step", lambda: measure_step(experiment))
            is_worker = info.rank > 0 or not has_dedicated_server(config.topology, info.size)
            measure("memory", lambda: measure_memory(experiment, is_worker))
            if info.rank == info.size - 1:
                measure("variants", lambda: measure_variants(experiment, precisions))
    return 0


def _connect_and_measure(config: Config, rank_info: RankInfo | None) -> dict[str, Any]:
    comm = config.comm.model_copy(update={"rendezvous_timeout": CONNECT_TIMEOUT_SECONDS})
    group = connect(rank_info, config.topology, comm, StopRequest(0.0))
    try:
        return measure_collectives(group.collectives, group.rank, group.size, group.device)
    finally:
        group.failure_detector.disarm()
        group.close()


def compile_probe(file: Path, arguments: ProbeArguments) -> int:
    """Apart from the others, for it takes a minute and may fail in many ways."""
    config, _ = resolve_arguments(arguments.words)
    with torch_settings(config):
        experiment = Experiment(config, pick_device(config.topology, 0))
        write_result(file, {"compiled": measure_compiled(experiment)})
    return 0
