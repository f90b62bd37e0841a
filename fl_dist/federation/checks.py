"""Whether data, model, task and algorithm of a configuration fit together, before anything is trained."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fl_dist.algorithms.core import Algorithm, part_name
from fl_dist.common.errors import ConfigError, DataError, describe_error
from fl_dist.common.hook_contract import HookContractError, describe_value
from fl_dist.common.registry import BuilderError
from fl_dist.common.rows import Rows, call_module, main_tensor, map_rows, slice_rows, tensors_of
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
    "real inputs": "numbers as inputs, in one tensor, and the data {data[name]} holds {rows}",
}


def check_data(config: Config, task: Task, dataset: Dataset, algorithm: Algorithm) -> None:
    """Raise unless the task and the algorithm can use the data."""
    task.check(dataset)
    precision = config.local.precision
    for name in ("x_train", "x_test", "y_train", "y_test"):
        if not all(_is_finite(x, DTYPES[precision]) for x in tensors_of(getattr(dataset, name))):
            raise DataError(
                f"data {config.data['name']}: {name} holds values that are not finite in {precision};"
                " scale, replace or remove them"
            )
    is_tensor = isinstance(dataset.x_train, Tensor)
    have = {"logits": task.logits, "real inputs": dataset.is_numeric and is_tensor}
    words = config.model_dump() | {"rows": "ids" if is_tensor else "several tensors"}
    for part in algorithm.parts:
        for need in part.needs:
            if not have.get(need, True):
                who = f"the part {part_name(part)} of this algorithm"
                raise ConfigError(f"{who} needs {MISSING_REQUIREMENT[need].format(**words)}")
    if not is_tensor and (algorithm.changes_inputs or config.augment["name"] != "none"):
        what = "this algorithm" if algorithm.changes_inputs else f"augment {config.augment['name']}"
        raise ConfigError(f"{what} changes inputs of one tensor, and the data {config.data['name']} holds several")


def check_buffers(config: Config, algorithm: Algorithm, model: FlatModel) -> None:
    """Raise if the statistics of layers would leave a client beside an update that has to be all that does."""
    for part in algorithm.parts:
        if "no other uploads" in part.needs and model.buffers.size:
            raise ConfigError(
                f"model {config.model['name']} also sends {model.buffers.names[0]}, which the part {part_name(part)}"
                " does not protect; choose a model without BatchNorm, such as one with GroupNorm"
            )


@torch.no_grad()
def check_model(
    config: Config, task: Task, dataset: Dataset, model: FlatModel, interface: ModelInterface
) -> tuple[str, ...]:
    """Two rows through the model: raise unless it can take them and gives what the task wants.

    The names of the metrics.
    """
    model.module.eval()
    device, local = model.vector.device, config.local
    dtype = DTYPES[local.precision]
    x = normalise(
        _example_rows(dataset, interface.vocabulary, device), dataset, dtype, IMAGE_FORMATS[local.memory_format]
    )
    x, y = task.batch(x, to_training_dtype(dataset.y_test[:2], device, dtype))
    shape = main_tensor(x).shape
    names = "" if isinstance(x, Tensor) else f" ({', '.join(x)})"
    name, rows = config.model["name"], f"rows of shape {list(shape[1:])}{names}"
    ids = "" if dataset.is_numeric else f" of ids 0 to {interface.vocabulary - 1}, for which it needs an embedding"
    # Kernels that can be differentiated once may hide values that are not finite.
    with _as_builder_error(f"model {name} cannot take {rows}{ids}"), second_order(model.module):
        outputs = call_module(model.module, x)
    if not isinstance(outputs, Tensor):
        raise BuilderError(f"model {name} gave {describe_value(outputs)} for {rows}; it has to give a tensor")
    actual, expected = outputs.shape[-1], interface.outputs
    is_wrong = actual < expected if task.allows_more_outputs else actual != expected
    if is_wrong or outputs.shape[:1] != shape[:1]:
        expectation = f"{expected} numbers for each, as task {config.task['name']} asks"
        raise BuilderError(f"model {name} gave shape {list(outputs.shape)} for {shape[0]} {rows}, not {expectation}")
    if not bool(torch.isfinite(outputs).all()):
        raise BuilderError(f"model {name} gave values that are not finite for {rows}, before any training")
    with _as_builder_error(f"task {config.task['name']} failed on outputs of shape {list(outputs.shape)}"):
        return check_task(task, config.task["name"], outputs, y)


def _example_rows(dataset: Dataset, vocabulary: int, device: torch.device) -> Rows:
    """Two test rows; of ids, one is the largest, so that a model with fewer is found before training."""
    rows = map_rows(lambda x: x.to(device, copy=True), slice_rows(dataset.x_test, slice(2)))
    if not dataset.is_numeric:
        ids = main_tensor(rows)
        ids[(0,) * ids.dim()] = vocabulary - 1
    return rows


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
