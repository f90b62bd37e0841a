"""Saving while training continues: a thread on each rank writes what the rank holds, and reports to rank 0."""

import json
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from fl_dist.distributed import fault_injection
from fl_dist.distributed.host_transfer import NO_TRANSFER, HostTransfer
from fl_dist.distributed.process_group import ProcessGroup
from fl_dist.storage import checkpoint, checkpoint_files
from fl_dist.storage.checkpoint import CheckpointFailedError, Extra, Tensors, copy_name, error_reason, folder_name
from fl_dist.storage.checkpoint_manager import COMPACTED_PACK, CheckpointManager, RankPart

log = logging.getLogger(__name__)
POLL_INTERVAL_SECONDS = 0.01
WAIT_WARNING_SECONDS = 30.0
"""Rank 0 warns after this time that it still waits for a rank, then after twice the time, and so on."""


class CheckpointRequest(NamedTuple):
    """What a rank has to save of a round."""

    round: int
    clients: dict[int, Tensors]
    server: Tensors | None
    """On rank 0."""
    extra: Extra
    durable: bool


class CheckpointWriter:
    """A rank's part of each checkpoint, written by a thread, one checkpoint at a time."""

    def __init__(
        self,
        root: Path,
        group: ProcessGroup,
        run: str,
        manager: CheckpointManager | None,
        transfer: HostTransfer = NO_TRANSFER,
        has_state: bool = True,
    ) -> None:
        """`manager`: on rank 0; `has_state`: whether clients have variables; if not, rank 0 saves alone."""
        self.root, self.group, self.run, self.manager, self.transfer = root, group, run, manager, transfer
        self._has_state, self._ranks = has_state, range(group.size if has_state else 1)
        self._pack = f"clients-{group.rank}.pack"
        # The training loop and the thread share the queue and the events, which are thread-safe, and the manager.
        self._thread: threading.Thread | None = None
        self._requests: SimpleQueue[CheckpointRequest | None] = SimpleQueue()
        self._idle, self._closing = threading.Event(), threading.Event()
        self._idle.set()

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def start(
        self, round_: int, clients: dict[int, Tensors], server: Tensors | None, extra: Extra, is_last: bool = False
    ) -> None:
        """Begin a checkpoint of the arguments, which nobody may change any more; transfers may still be in progress."""
        if self.group.rank not in self._ranks:
            return
        self.join()
        self._idle.clear()
        durable = is_last or self._has_state or self.manager is None or self.manager.is_sync_due
        self._requests.put(CheckpointRequest(round_, clients, server, extra, durable))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def join(self) -> None:
        """Wait for the checkpoint in progress."""
        self._idle.wait()

    def close(self) -> None:
        """End the thread, whatever it waits for: one that still uses the store would crash the interpreter's exit."""
        self._closing.set()
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._save(request)
            except Exception as e:  # a defect; the next checkpoint may succeed
                log.exception("the checkpoint of round %d was not completed", request.round)
                if self.manager is not None:
                    self.manager.finish(request.round, error_reason(e))
            del request  # frees its tensors
            self._idle.set()

    def _save(self, request: CheckpointRequest) -> None:
        try:
            part = self._write(request)
        except Exception as e:
            self.discard(request.round)
            part = RankPart(error=f"{error_reason(e)} ({self.root})")
        # When the job is lost, so is the store; the checkpoint stays unfinished, as if the process had been killed.
        try:
            if self.manager is None:
                self.group.store.set(f"save/{request.round}/{self.group.rank}", json.dumps(asdict(part)))
            else:
                others = [self._wait_for_part(request.round, rank) for rank in self._ranks if rank != self.group.rank]
                self.manager.complete(request.round, [part, *others], request.extra, request.durable)
        except (CheckpointFailedError, RuntimeError) as e:
            log.info("the checkpoint of round %d was not completed: %s", request.round, e)
            if self.manager is not None:
                self.manager.finish(request.round, str(e))

    def _write(self, request: CheckpointRequest) -> RankPart:
        folder, part = self.root / folder_name(request.round), RankPart()
        checkpoint_files.create_folder(folder, self.run)
        fault_injection.point("save-begin")
        self.transfer.synchronize()
        if request.server is not None:
            part.server = checkpoint_files.write_server(folder, request.server, request.durable)
        if request.clients:
            clients = ((client, checkpoint_files.serialize(t)) for client, t in request.clients.items())
            part.clients = checkpoint_files.write_pack(folder, self._pack, clients)
        fault_injection.point("save-written")
        return part

    def discard(self, round_: int) -> None:
        """Remove what this rank wrote for a failed checkpoint."""
        names = [self._pack, copy_name(self._pack)]
        if self.manager is not None:
            names += [checkpoint.SERVER, COMPACTED_PACK, copy_name(COMPACTED_PACK), checkpoint.UNFINISHED_MARKER]
            names = [checkpoint.MANIFEST, checkpoint.MANIFEST_COPY, *names]
        checkpoint_files.remove_files(self.root / folder_name(round_), names)

    def _wait_for_part(self, round_: int, rank: int) -> RankPart:
        """Wait for a rank's part without a limit: a slow disk is no failure, and a lost rank ends the run."""
        key, began, warn_after = f"save/{round_}/{rank}", time.monotonic(), WAIT_WARNING_SECONDS
        while (text := self.group.store.get(key)) is None:
            if self._closing.wait(POLL_INTERVAL_SECONDS) or self.group.failure_detector.failure_message:
                failure = self.group.failure_detector.failure_message
                raise CheckpointFailedError(failure or "the run ended before every rank had saved its part")
            if time.monotonic() - began > warn_after:
                log.warning("the checkpoint of round %d has waited %.0f s for rank %d", round_, warn_after, rank)
                warn_after *= 2
        self.group.store.delete(key)
        return RankPart(**json.loads(text))
