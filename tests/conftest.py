"""How the tests are spread over processes: those that share started jobs stay together, the longest begin first."""

import pytest

TOGETHER = ("test_slurm", "test_algorithms", "test_properties")
FIRST = ("test_slurm", "test_docs", "test_chaos", "test_algorithms", "test_launch")


def pytest_itemcollected(item: pytest.Item) -> None:
    if (module := item.path.stem) in TOGETHER:
        item.add_marker(pytest.mark.xdist_group(module))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
