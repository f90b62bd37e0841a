"""Loss and accuracy of the global model on the test set."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_dist.data import normalise
from fl_dist.engine.flat import Flat
from fl_dist.engine.world import World


class Evaluator:
    """Holds the test data on the device; borrows the world's twin model."""

    def __init__(self, world: World, batch_size: int) -> None:
        self.world, self.batch_size = world, batch_size
        self.x, self.y = world.dataset.x_test.to(world.device), world.dataset.y_test.to(world.device)

    @torch.no_grad()
    def __call__(self, x: Tensor, buffers: Tensor) -> dict[str, float]:
        model: Flat = self.world.twin
        model.bind(x)
        model.buffers.write(buffers)
        model.module.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.x.device)
        right = torch.zeros((), dtype=torch.int64, device=self.x.device)
        for rows, labels in zip(self.x.split(self.batch_size), self.y.split(self.batch_size), strict=True):
            logits = model.module(normalise(rows, self.world.dataset, self.world.samples.dtype))
            loss += F.cross_entropy(logits, labels, reduction="sum").double()
            right += (logits.argmax(1) == labels).sum()
        return {"test_loss": float(loss) / len(self.y), "test_accuracy": int(right) / len(self.y)}
