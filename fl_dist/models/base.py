"""The table of models."""

from torch import nn

from fl_dist.common.registry import Registry

# A builder takes the shape of one input row and the number of classes; its module returns logits.
models: Registry[nn.Module] = Registry("model")
