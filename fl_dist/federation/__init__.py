"""One round and the next: plan, broadcast, local training, reduce, server step, evaluation."""
