"""How the tests are spread over processes: by file, for tests of a file share started jobs; the longest begin first."""

import os
from collections.abc import Iterator

import pytest

FIRST = (
    *("slurm", "ends", "launch", "gpu", "pulse", "docs", "algorithms", "chaos", "checkpoint", "monitor", "nonsense"),
    *("yours", "evaluate", "same_bits", "diagnostics", "report", "own", "papers", "newcomer", "saving", "runs"),
)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Arrays that are shared between ranks, and matplotlib's fonts, lie in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_DIST_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("fonts")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the tests that take minutes; CI runs them")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {f"test_{name}": k for k, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if config.getoption("thorough") or os.environ.get("CI") == "true":
        return
    named = [argument.partition("::")[0] for argument in config.args if ".py" in argument]
    left_out = [item for item in items if item.get_closest_marker("thorough") and not _is_named(item, named)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _is_named(item: pytest.Item, named: list[str]) -> bool:
    """Whoever names a file wants all of it."""
    return any(str(item.path).endswith(argument) for argument in named)
