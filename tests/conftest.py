"""The order of the test folders, shared fixtures, and reruns of timing tests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.requirements import required_names

FOLDERS = ("cluster", "process", "unit")
"""In the order in which they run: the folders with the longest waits first."""

settings.register_profile(
    "deterministic", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("deterministic")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put shared arrays and matplotlib's fonts into a folder of the tests, not of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_DIST_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("fonts")))
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Modules that a test file has written and imported do not stand for those of the same name of another file."""
    yield
    folder = tmp_path_factory.getbasetemp()
    for name, module in list(sys.modules.items()):
        if folder in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


def pytest_configure(config: pytest.Config) -> None:
    required_names()  # refuses unknown names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name))
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))
