"""Where the keys of a configuration were set, for messages."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fl_dist.common.formatting import shorten

KeyPath = tuple[Any, ...]
Sources = Mapping[KeyPath, str]
"""Where keys were set; a key that is not in it was set where its section was, down to the empty path."""
COMMAND_LINE = "the command line"
NO_SOURCES: Sources = {(): "the configuration"}


class Location(NamedTuple):
    """A place in a configuration."""

    path: KeyPath
    sources: Sources

    def at(self, *steps: Any) -> "Location":
        """A place below this one."""
        return self._replace(path=self.path + steps)

    @property
    def key(self) -> str:
        """With dots, as on the command line."""
        return shorten(".".join(map(str, self.path)))

    @property
    def source(self) -> str:
        """Where it was set, for the end of a message."""
        path, sources = self
        source = next(sources[path[:end]] for end in range(len(path), -1, -1) if path[:end] in sources)
        return f"{'on' if source == COMMAND_LINE else 'in'} {source}"
