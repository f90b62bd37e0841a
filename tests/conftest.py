"""How the tests are spread over processes: by file, for tests of a file share started jobs; the longest begin first."""

import os

import pytest

FIRST = ("slurm", "ends", "launch", "docs", "nonsense", "algorithms", "chaos", "checkpoint", "same_bits", "saving")
THOROUGH = ("test_ends", "test_chaos")
"""Minutes of launchers and ranks that are killed: for CI, and for those who ask for it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the tests that kill jobs for minutes; CI does")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {f"test_{name}": k for k, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    named = any(name in argument for name in THOROUGH for argument in config.args)
    if not (config.getoption("thorough") or os.environ.get("CI") == "true" or named):
        left_out = [item for item in items if item.path.stem in THOROUGH]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
