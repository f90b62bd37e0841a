"""The layers of the tests, what they share, and which of them are run once more when they fail."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.requirements import required

LAYERS = ("cluster", "process", "unit")
"""In the order in which they begin: what waits most comes first, what is short fills the end."""

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Arrays that are shared between ranks, and matplotlib's fonts, lie in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FL_DIST_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("fonts")))
        yield


def pytest_configure(config: pytest.Config) -> None:
    required()  # refuses a word that it does not know


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LAYERS.index(item.path.parent.name))
    for item in items:
        if item.get_closest_marker("timing"):
            item.add_marker(pytest.mark.flaky(reruns=1))
