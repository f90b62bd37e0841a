"""The order of the test folders, shared fixtures, and reruns of timing tests."""

from collections.abc import Iterator

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


def pytest_configure(config: pytest.Config) -> None:
    required_names()  # refuses unknown names


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(item.path.parent.name))
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))
