"""Saving while training goes on: a thread on each rank writes, rank 0's completes the save and tidies up.

The fate of a save is known to rank 0 and told to all with the next round's orders: clients of a save that failed, for
whatever reason and on whichever rank, are unsaved again on every rank.
"""

import contextlib
import itertools
import json
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from fl_dist.machine import faults
from fl_dist.machine.comm import Comm
from fl_dist.machine.copies import HOST, Copies
from fl_dist.storage import checkpoint
from fl_dist.storage.checkpoint import Entry, Index, Manifest, PackWriter, Save, Tensors, folder_name
from fl_dist.storage.folder import sync_folder

log = logging.getLogger("fl_dist")
SLACK, RECENT, BATCH = 2, 4, 8
"""Packs may hold SLACK entries for each client, and those of RECENT saves. When there are those of BATCH saves more,
the oldest clients are brought along: seldom, for the files that this takes cost more than what is in them."""
PATROL = 8
"""Earlier saves whose files are looked for at each save, in turn; their folders are looked for always."""
CARRIED = "clients-carried.pack"
VOICE = 30.0
"""Seconds after which a save that waits for a rank says so."""
SETTLED = 1.0
"""Seconds after a durable save within which rank 0's own are whole, but the system brings them to disk when it likes:
a machine that fails takes such saves with it, and the durable one stays until there is another."""


Order = tuple[int, dict[int, Tensors], Tensors | None, dict[str, Any], bool]
"""What `Saver.start` was given, and whether it is to be durable."""


class Saver:
    """This rank's part of a save: a thread that writes what the rank holds, one save at a time."""

    def __init__(self, root: Path, comm: Comm, run: str, copies: Copies = HOST, clients: bool = True) -> None:
        """`clients`: whether they have variables; if not, rank 0 alone has something to save."""
        self.root, self.comm, self.run, self.copies = root, comm, run, copies
        self._clients, self._ranks = clients, range(comm.size) if clients else range(1)
        self.chief: Chief | None = None
        """On rank 0: completes the saves of all ranks."""
        self._thread: threading.Thread | None = None
        self._orders: SimpleQueue[Order | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._abandoned = threading.Event()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    def start(
        self,
        round_: int,
        clients: dict[int, Tensors],
        server: Tensors | None,
        extra: dict[str, Any],
        last: bool = False,
    ) -> None:
        """Begin a save of what the arguments hold, once it has arrived; nobody may write to it any more."""
        if self.comm.rank not in self._ranks:
            return
        self.join()
        self._idle.clear()
        durable = last or self._clients or self.chief is None or self.chief.unsettled
        self._orders.put((round_, clients, server, extra, durable))
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the save that was begun."""
        self._idle.wait()

    def close(self) -> None:
        """End the thread, whatever it waits for: one left behind in the store would crash the interpreter's end."""
        self._abandoned.set()
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._run(*order)
            except Exception as e:  # a defect: the next save may do better
                log.exception("the save of round %d was not completed", order[0])
                if self.chief is not None:
                    self.chief.give_up(order[0], _told(e))
            del order  # what was saved need not be held any longer
            self._idle.set()

    def _run(
        self, round_: int, clients: dict[int, Tensors], server: Tensors | None, extra: dict[str, Any], durable: bool
    ) -> None:
        mine: dict[str, Any] = {"clients": {}, "server": {}, "error": ""}
        try:
            self._write(round_, clients, server, mine, durable)
        except Exception as e:
            self.discard(round_)
            mine = {"clients": {}, "server": {}, "error": f"{_told(e)} ({self.root})"}
        # When the job is lost, the store is too; the save then stays unfinished, as if the process had been killed.
        try:
            if self.chief is None:
                self.comm.post(f"save/{round_}/{self.comm.rank}", json.dumps(mine))
            else:
                others = [self._await(round_, r) for r in self._ranks if r != self.comm.rank]
                self.chief.complete(round_, [mine, *others], extra, durable)
        except RuntimeError as e:
            log.info("the save of round %d was not completed: %s", round_, e)
            if self.chief is not None:
                self.chief.give_up(round_, str(e))

    def _write(
        self, round_: int, clients: dict[int, Tensors], server: Tensors | None, mine: dict[str, Any], durable: bool
    ) -> None:
        folder = self.root / folder_name(round_)
        checkpoint.begin(folder, self.run)
        faults.point("save-begin")
        self.copies.arrive()
        if server is not None:
            mine["server"] = checkpoint.write_server(folder, server, durable)
        if clients:
            with PackWriter(folder, self._pack) as writer:
                for client, tensors in clients.items():
                    writer.add(client, checkpoint.packed(tensors))
            mine["clients"] = writer.clients
        faults.point("save-written")

    @property
    def _pack(self) -> str:
        return f"clients-{self.comm.rank}.pack"

    def discard(self, round_: int) -> None:
        """Free the space that this rank took for a save that failed."""
        names = [self._pack, checkpoint.copy_of(self._pack)]
        if self.chief is not None:
            manifest = [checkpoint.MANIFEST, checkpoint.copy_of(checkpoint.MANIFEST)]
            names = [*manifest, *names, checkpoint.SERVER, CARRIED, checkpoint.copy_of(CARRIED), checkpoint.UNFINISHED]
        checkpoint.remove(self.root / folder_name(round_), names)

    def _await(self, round_: int, rank: int) -> dict[str, Any]:
        """What a rank says of its part, however long it takes: a slow disk is no failure, a lost rank ends the run."""
        key, began, told = f"save/{round_}/{rank}", time.monotonic(), VOICE
        while (text := self.comm.read(key)) is None:
            if self._abandoned.wait(0.01) or self.comm.trouble():
                raise RuntimeError(self.comm.trouble() or "the run ended before every rank had saved")
            if time.monotonic() - began > told:
                log.warning("the save of round %d waits for rank %d since %.0f s", round_, rank, told)
                told *= 2
        self.comm.forget(key)
        return json.loads(text)


class Chief:
    """Rank 0's view of all saves: what is where, what is kept, what may go."""

    def __init__(self, root: Path, run: str, keep: int, start: Save | None, on_whole: Callable[[], None]) -> None:
        self.root, self.run, self.keep, self._on_whole = root, run, keep, on_whole
        self.index: Index = {} if start is None else dict(start.index)
        self.round = 0 if start is None else start.manifest.round
        """The round of the newest whole save."""
        self.made = self.failed = 0
        self.failure = ""
        """Why the last save failed; empty after a good one."""
        self.vanished = False
        """Files that later saves rely on are gone: what the ranks hold has to be saved anew, all of it."""
        self.hopeless = ""
        """Why no save can be whole any more."""
        self._fate: tuple[int, bool] | None = None
        if os.path.isdir(root):
            checkpoint.remove_unfinished(root, run)
            checkpoint.set_aside(root, self.round)
        self._known = checkpoint.manifests(root, run)
        kept = [m for r, m in self._known.items() if (root / folder_name(r) / checkpoint.SERVER).is_file()]
        self._kept: list[Manifest] = kept[-keep:]
        self._live = Counter(entry.round for entry in self.index.values())
        needed = [self._known[r] for r in start.manifest.rounds] if start else []
        self._entries = deque(item for m in needed for item in m.entries())
        """What the packs hold, the oldest first; some of it written again since."""
        self._looked = 0
        self._durable: Manifest | None = None
        """The newest save that a failing machine leaves, and when it was made."""
        self._settled = -math.inf

    @property
    def unsettled(self) -> bool:
        """Whether the next save has to be durable."""
        return time.monotonic() - self._settled > SETTLED

    def complete(self, round_: int, parts: list[dict[str, Any]], extra: dict[str, Any], durable: bool = True) -> None:
        """When every rank has written: the manifest, which makes the save whole, and then what it makes superfluous."""
        errors = [f"rank {rank}: {part['error']}" for rank, part in enumerate(parts) if part["error"]]
        try:
            if errors:
                raise OSError("; ".join(errors))
            written = [(int(c), Entry(round_, *place)) for part in parts for c, place in part["clients"].items()]
            self._switch(round_, dict(written), parts[0]["server"], extra, durable)
        except (OSError, checkpoint.Damaged) as e:
            self.failed, self.failure = self.failed + 1, str(e) if errors else f"{_told(e)} ({self.root})"
            log.warning("the checkpoint of round %d could not be written: %s; training goes on", round_, self.failure)
        self._fate = (round_, not self.failure)

    def give_up(self, round_: int, reason: str) -> None:
        """The save under way goes no further; it will never be whole, if it is not yet."""
        whole = self.round == round_
        if not whole:
            self.failed, self.failure = self.failed + 1, reason
        self._fate = (round_, whole)

    def take_fate(self) -> tuple[int, bool]:
        """The round of a save that was decided and whether it is whole, to be told once; (0, True) if there is none."""
        fate = self._fate
        if fate is None:  # and left so: the thread may set it at this moment
            return 0, True
        self._fate = None
        return fate

    def _switch(
        self, round_: int, changed: Index, server: dict[str, Any], extra: dict[str, Any], durable: bool
    ) -> None:
        self._look_for_what_is_needed(changed)
        carried, passed = self._carry(round_, changed)
        changed |= carried
        live = self._live + Counter(entry.round for entry in changed.values())
        live.subtract(self.index[c].round for c in changed if c in self.index)
        history = sorted(r for r, clients in live.items() if clients > 0 and r != round_)
        clients, packs = {str(c): e[1:] for c, e in changed.items()}, sorted({e.pack for e in changed.values()})
        manifest = Manifest(self.run, round_, server, clients, packs, history, extra)
        faults.point("save-manifest")
        if durable:
            sync_folder(self.root)
        manifest.write(self.root, durable)
        if durable:
            self._durable, self._settled = manifest, time.monotonic()
        self.index |= changed
        for _ in range(passed):
            self._entries.popleft()
        self._entries.extend(changed.items())
        self._live, self._known[round_] = +live, manifest
        self.round, self.made, self.failure, self.vanished = round_, self.made + 1, "", False
        self._tidy(manifest)

    def _tidy(self, manifest: Manifest) -> None:
        """After a save is whole; what cannot be done now does it no harm."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / folder_name(manifest.round) / checkpoint.UNFINISHED)
            faults.point("save-switched")
            self._on_whole()
            self._collect(manifest)
        except OSError as e:
            log.warning("the checkpoint of round %d is whole, but: %s", manifest.round, _told(e))

    def _look_for_what_is_needed(self, changed: Index) -> None:
        """Before a save builds on others: see that they are still there."""
        if not self._live:
            return
        there = set(checkpoint.rounds_in(self.root))
        for round_ in itertools.islice(self._live, self._looked, self._looked + PATROL):
            if not checkpoint.is_there(self.root, self._known[round_]):
                there.discard(round_)
        self._looked = self._looked + PATROL if self._looked + PATROL < len(self._live) else 0
        gone = self._live.keys() - there
        lost = {c for c, entry in self.index.items() if entry.round in gone} - changed.keys() if gone else set()
        if lost and self.vanished:
            self.hopeless = f"checkpoint files vanished with the variables of {len(lost)} clients that no rank holds"
            raise OSError(self.hopeless)
        if lost:
            self.vanished = True
            raise OSError(
                f"files of earlier checkpoints have vanished, e.g. {folder_name(min(gone))}; all is saved anew"
            )

    def _carry(self, round_: int, changed: Index) -> tuple[Index, int]:
        """The oldest clients come along, as many as changed at most: no pack outlives what is in it.

        Returned are their new entries and how many old ones have thereby been dealt with.
        """
        chosen: Index = {}
        most = SLACK * len(self.index) + RECENT * len(changed)
        if len(self._entries) <= most + BATCH * len(changed):
            return {}, 0
        passed = 0
        for client, entry in self._entries:
            if len(self._entries) - passed <= most or len(chosen) == len(changed):
                break
            passed += 1
            if self.index[client] == entry and client not in changed:
                chosen[client] = entry
        if not chosen:
            return {}, passed
        with PackWriter(self.root / folder_name(round_), CARRIED) as writer:
            checkpoint.carry(self.root, chosen, writer)
        return {int(client): Entry(round_, *place) for client, place in writer.clients.items()}, passed

    def _collect(self, manifest: Manifest) -> None:
        """Remove what the saves of this run wrote and no kept save needs."""
        saves = [*self._kept, manifest]
        self._kept = saves[-self.keep :]
        stay = [*self._kept, *([] if self._durable is None else [self._durable])]
        needed = {r for m in stay for r in m.rounds}
        for old in saves[: -self.keep]:
            if old.round in needed and old is not self._durable:  # by clients whose variables have not changed since
                checkpoint.remove(self.root / folder_name(old.round), [checkpoint.SERVER])
        for round_ in [r for r in self._known if r not in needed]:
            checkpoint.remove(self.root / folder_name(round_), self._known.pop(round_).files)


def _told(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, checkpoint.Damaged) else f"{type(error).__name__}: {error}"
