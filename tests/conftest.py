"""How the tests are spread over processes: by file, for tests of a file share started jobs; the longest begin first."""

import pytest

FIRST = ("slurm", "ends", "launch", "docs", "nonsense", "algorithms", "chaos", "checkpoint", "same_bits", "saving")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": k for k, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
