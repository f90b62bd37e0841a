"""Optimisers of local steps, one file each, and schedules of learning rates. A new file here registers itself."""

from fl_dist.common.registry import import_submodules

import_submodules(__name__)
