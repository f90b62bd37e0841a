"""The table of models."""

from torch import nn

from fl_dist.common.registry import Registry

# `outputs` is how many numbers the module has to give for a row (classes, targets) or a token (the vocabulary);
# `classes` is the same number under the name that a classifier would use. Rows of ids have 0 to `vocabulary` - 1; it is
# 0 for numbers.
models: Registry[nn.Module] = Registry("model", nn.Module, supplied=("shape", "outputs", "classes", "vocabulary"))
