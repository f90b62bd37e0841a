"""Whether data, model, task and algorithm of a configuration fit together, before anything is trained."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fl_dist.algorithms.core import Algorithm
from fl_dist.common.errors import ConfigError, DataError, describe_error
from fl_dist.common.hook_contract import HookContractError, describe_value
from fl_dist.common.registry import BuilderError
from fl_dist.config import Config
from fl_dist.data import Dataset, normalise
from fl_dist.distributed import hardware_errors
from fl_dist.federation.batch_loader import to_training_dtype
from fl_dist.federation.client_data import DTYPES, IMAGE_FORMATS
from fl_dist.federation.flat_model import FlatModel
from fl_dist.models import ModelInterface, second_order
from fl_dist.tasks import Task, check_task

MISSING_REQUIREMENT = {
    "logits": "logits of classes, which the task {task[name]} does not have",
    "real inputs": "numbers as inputs, and the data {data[name]} holds ids",
}


def check_data(config: Config, task: Task, dataset: Dataset, algorithm: Algorithm) -> None:
    """Raise unless the task and the algorithm can use the data."""
    task.check(dataset)
    precision = config.local.precision
    for name in ("x_train", "x_test", "y_train", "y_test"):
        x: Tensor = getattr(dataset, name)
        if not _is_finite(x, DTYPES[precision]):
            raise DataError(
                f"data {config.data['name']}: {name} holds values that are not finite in {precision};"
                " scale, replace or remove them"
            )
    have = {"logits": task.logits, "real inputs": dataset.is_numeric}
    for part in algorithm.parts:
        for need in part.needs:
            if not have[need]:
                who = f"the part {type(part).__name__.lower()} of this algorithm"
                raise ConfigError(f"{who} needs {MISSING_REQUIREMENT[need].format(**config.model_dump())}")


@torch.no_grad()
def check_model(config: Config, task: Task, dataset: Dataset, model: FlatModel, interface: ModelInterface) -> None:
    """Two rows through the model: raise unless it can take them and gives what the task wants."""
    model.module.eval()
    device, local = model.vector.device, config.local
    dtype = DTYPES[local.precision]
    x = normalise(dataset.x_test[:2].to(device), dataset, dtype, IMAGE_FORMATS[local.memory_format])
    x, y = task.batch(x, to_training_dtype(dataset.y_test[:2], device, dtype))
    name, rows = config.model["name"], f"rows of shape {list(x.shape[1:])}"
    ids = "" if dataset.is_numeric else " of ids, for which it needs an embedding"
    # Kernels that can be differentiated once may hide values that are not finite.
    with _as_builder_error(f"model {name} cannot take {rows}{ids}"), second_order(model.module):
        outputs = model.module(x)
    if not isinstance(outputs, Tensor):
        raise BuilderError(f"model {name} gave {describe_value(outputs)} for {rows}; it has to give a tensor")
    if outputs.shape[-1] != interface.outputs or outputs.shape[:1] != x.shape[:1]:
        expected = f"{interface.outputs} numbers for each, as task {config.task['name']} asks"
        raise BuilderError(f"model {name} gave shape {list(outputs.shape)} for {len(x)} {rows}, not {expected}")
    if not bool(torch.isfinite(outputs).all()):
        raise BuilderError(f"model {name} gave values that are not finite for {rows}, before any training")
    with _as_builder_error(f"task {config.task['name']} failed on outputs of shape {list(outputs.shape)}"):
        check_task(task, config.task["name"], outputs, y)


@contextlib.contextmanager
def _as_builder_error(what: str) -> Iterator[None]:
    """Whatever the body raises is a defect of the model or task, unless the machine failed."""
    try:
        yield
    except HookContractError:
        raise
    except Exception as e:
        if hardware_errors.classify(e) is not None:
            raise
        raise BuilderError(f"{what}: {describe_error(e)}") from e


def _is_finite(x: Tensor, dtype: torch.dtype) -> bool:
    """In the precision of training: 1e300 is infinite in float32."""
    if not x.is_floating_point() or not x.numel():
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x)).to(dtype)).all())  # a NaN is minimum and maximum
