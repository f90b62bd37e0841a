"""Tasks, one file each: what a batch is, what is minimised, what is measured. A new file here registers itself."""

from fl_dist.common.registry import import_submodules
from fl_dist.tasks.base import PrimaryMetric, Task, check_task, tasks

import_submodules(__name__)
__all__ = ["PrimaryMetric", "Task", "check_task", "tasks"]
