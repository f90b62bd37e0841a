"""Signs of life: a thread on each rank says that it is there, and looks whether others are and its own gets on.

How long a round takes says nothing about who is lost. A process that was killed or stopped no longer beats; one that is
stuck beats, but its main thread does not tick. Rank 0 watches over all ranks, and all watch over rank 0.
"""

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fl_dist.common.terminal import complain
from fl_dist.machine.meeting import Board, Lost

log = logging.getLogger("fl_dist")
BEAT = 0.5
SILENCE = 7.0
"""Seconds without a beat after which a rank is lost."""
PATIENCE = 4.0
"""The same when a connection has broken, and the survivors ask who is missing; and what they wait for each other."""
PAUSE = 2.0
"""Seconds that a beat may be late; if it is later, this process was stopped."""
GRACE = 5.0
"""Seconds in which the main thread has to notice a failure; a kernel or a loop that never ends does not let it."""
GONE = "gone"
HOW = "(killed, out of memory or hung)"


class Failure(NamedTuple):
    """Why the job ends, as all ranks are told."""

    message: str
    code: int = 1
    passes: bool = True
    ranks: tuple[int, ...] = ()
    """Those that were lost, if it is that."""

    def lost(self) -> Lost:
        return Lost(self.message, self.code, self.ranks, self.passes)


class Heard:
    """When which rank's beat last changed."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[str, float]] = {}
        self._asked = self._since = time.monotonic()

    @property
    def seconds(self) -> float:
        """For how long it has listened."""
        return self._asked - self._since

    def silent(self, beats: dict[int, str], seconds: float) -> list[int]:
        """The ranks whose beat has been the same for so long; who has said goodbye is not missed."""
        now = time.monotonic()
        if now - self._asked > BEAT + PAUSE:  # this process was stopped, and has not heard them meanwhile
            self._last.clear()
            self._since = now
        self._asked = now
        for rank, beat in beats.items():
            if self._last.get(rank, ("", 0.0))[0] != beat:
                self._last[rank] = (beat, now)
        return [r for r, beat in beats.items() if beat != GONE and now - self._last[r][1] >= seconds]


class Pulse:
    def __init__(self, board: Board, rank: int, size: int, timeout: float, cut: Callable[[], None]) -> None:
        """`timeout`: seconds without a tick after which a rank is stuck; `cut` ends what the main thread waits for."""
        self.board, self.rank, self.size, self.timeout, self._cut = board, rank, size, timeout, cut
        self.failure: Failure | None = None
        self._doing, self._ticked, self._waits_since = "", 0.0, 0.0
        self._noticed = self._leaving = self._connecting = False
        self._until: float | None = None
        self._server = "rank 0"
        self._round: tuple[int, dict[int, int]] = 0, {}
        self._stopped, self._beats = threading.Event(), itertools.count(1)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    # The main thread.

    def begin(self) -> None:
        """Once every rank can be reached; the first beat is there before any other rank looks for it."""
        self._beat()

    def start(self) -> None:
        """When every rank has begun."""
        self._server = self._name(0)
        self._thread.start()

    def connects(self, now: bool) -> None:
        """While ranks connect they wait for each other, however long that takes."""
        self._connecting = now

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def begins(self, index: int, assignment: dict[int, int]) -> None:
        """A round, and which rank has which clients: they are missed with it."""
        self._round = index + 1, assignment

    def doing(self, what: str) -> None:
        """What the main thread is at and has to get on with; nothing, if that is empty."""
        self._doing, self._ticked = what, time.monotonic()

    def tick(self) -> None:
        """It gets on. Lost, if the job has failed meanwhile."""
        self._ticked = time.monotonic()
        if self.failure is not None and not self._leaving:
            self._noticed = True
            raise self.failure.lost()

    def waits(self, for_others: bool) -> None:
        self._waits_since = time.monotonic() if for_others else 0.0

    def leaves(self) -> None:
        """The last round is over: this rank has nothing more to hear from the others."""
        self._leaving = True

    def tell(self, failure: Failure) -> Failure:
        """Why the job ends; what was told first stays."""
        self._noticed = True
        return self._hears(self._share(failure))

    def cause(self) -> Failure | None:
        """After a connection broke: what was told, or who does not beat any more."""
        self._noticed = True
        heard, others, end = Heard(), self._present(), time.monotonic() + 4 * PATIENCE
        # However often it was stopped meanwhile.
        while self.failure is None and heard.seconds < PATIENCE + BEAT and time.monotonic() < end:
            if (failure := self._told()) is not None:
                return self._hears(failure)
            silent = heard.silent(self._beats_of(others), PATIENCE)
            if silent:
                return self.tell(self._loss(silent))
            time.sleep(0.05)
        return self.failure

    def without_server(self) -> Failure:
        """The board went with it; so it was lost, unless this rank has heard why the job ends."""
        return self._keeps(self._loss([0]))

    def linger(self, seconds: float) -> None:
        """Until the others have heard why this rank ends, or have gone: rank 0 takes the board with it. Once only."""
        lost = () if self.failure is None else self.failure.ranks
        self._until = self._until or time.monotonic() + seconds
        while self._waiting(lost) and time.monotonic() < self._until:
            time.sleep(0.02)

    def _waiting(self, lost: Sequence[int]) -> list[int]:
        return [r for r in self._present() if r not in lost and self.board.read(f"heard/{r}") is None]

    # The thread.

    def _run(self) -> None:
        heard, began = Heard(), time.monotonic()
        while self.failure is None and not self._stopped.wait(BEAT):
            if time.monotonic() - began > BEAT + PAUSE:
                self._ticked = time.monotonic()
            try:
                self._beat()
                if failure := self._told() or self._found(heard):
                    self._keeps(failure)
            except RuntimeError:
                self.without_server()
            began = time.monotonic()
        if self.failure is not None and not self._leaving:
            self._alarm()
        self._post("beat", GONE)

    def _found(self, heard: Heard) -> Failure | None:
        """What this rank sees by itself: others that are silent, its own main thread that is stuck."""
        if self._doing and time.monotonic() - self._ticked > self.timeout:
            what = f"no progress for {self.timeout:g} s (comm.timeout) in {self._doing}"
            return self._share(Failure(f"{self._name(self.rank)} is stuck: {what}"))
        if self._leaving and self.rank:
            return None
        beats = self._beats_of(list(range(1, self.size)) if self.rank == 0 else [0])
        if silent := heard.silent(beats, SILENCE):
            return self._share(self._loss(silent))
        waits = [float(beat.split()[1]) for beat in beats.values() if beat != GONE]
        if self.rank == 0 and waits and min([*waits, self._waited()]) > self.timeout:
            return self._share(Failure(f"all ranks wait for each other since {min(waits):.0f} s: the network hangs"))
        return None

    def _alarm(self) -> None:
        """Let the main thread know, wherever it is; if it cannot, end the process, and with it what it waits for."""
        self._post("heard", "1")
        end = time.monotonic() + GRACE
        while True:
            if not self._noticed:
                self._cut()  # again and again: it may just be connecting
            if self._stopped.wait(BEAT / 5):
                return
            self._post("beat", f"{next(self._beats)} 0")  # others still ask who is missing
            if time.monotonic() > end and not self._noticed and (self._doing or self._waits_since):
                self.end()

    def end(self) -> None:
        """End the process, whose main thread is somewhere from where it does not come back."""
        failure = self.failure or Failure("the ranks lost touch")
        line = f"{failure.message}{f'; this rank was in {self._doing}' if self._doing else ''}"
        log.error("%s", line)
        if self.rank == 0:
            complain(line)
        os._exit(failure.code)

    def _post(self, what: str, text: str) -> None:
        """To whoever is still there; rank 0 may have left, and taken the board with it."""
        with contextlib.suppress(RuntimeError):
            self.board.post(f"{what}/{self.rank}", text)

    def _beat(self) -> None:
        self.board.post(f"beat/{self.rank}", f"{next(self._beats)} {self._waited():.1f}")

    def _waited(self) -> float:
        since = self._waits_since
        return time.monotonic() - since if since and not self._connecting else 0.0

    def _hears(self, failure: Failure) -> Failure:
        """From here on this rank needs the board no more."""
        kept = self._keeps(failure)
        self._post("heard", "1")
        return kept

    def _keeps(self, failure: Failure) -> Failure:
        """The first that comes to this rank, from whichever thread."""
        with self._lock:
            self.failure = self.failure or failure
            return self.failure

    def _told(self) -> Failure | None:
        text = self.board.read("failure")
        return None if text is None else _read(text)

    def _share(self, failure: Failure) -> Failure:
        return _read(self.board.first("failure", json.dumps(failure)))

    def _present(self) -> list[int]:
        """The other ranks that have come and not gone."""
        beats = {r: self.board.read(f"beat/{r}") for r in range(self.size) if r != self.rank}
        return [r for r, beat in beats.items() if beat not in (None, GONE)]

    def _beats_of(self, ranks: list[int]) -> dict[int, str]:
        return dict(zip(ranks, self.board.read_all([f"beat/{r}" for r in ranks]), strict=True))

    def _loss(self, ranks: list[int]) -> Failure:
        names = " and ".join(map(self._name, ranks)) if ranks != [0] else f"{self._server}, the server,"
        number, assignment = self._round
        clients = [client for client, rank in assignment.items() if rank in ranks]
        when = f" in round {number}" if number else ""
        own = f", whose clients were {', '.join(map(str, clients))}" if clients else ""
        return Failure(f"{names} {'was' if len(ranks) == 1 else 'were'} lost {HOW}{when}{own}", ranks=tuple(ranks))

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self.board.read(f'host/{rank}') or 'an unknown host'}"


def _read(text: str) -> Failure:
    message, code, passes, ranks = json.loads(text)
    return Failure(message, code, passes, tuple(ranks))
