"""Tasks, one file each: what a batch is, what is minimised, what is measured."""

from fl_dist.tasks import classification, next_token, regression  # noqa: F401  (importing a task registers it)
from fl_dist.tasks.base import Headline, Task, tasks, try_task

__all__ = ["Headline", "Task", "tasks", "try_task"]
