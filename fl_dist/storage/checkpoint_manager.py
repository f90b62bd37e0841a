"""Rank 0's part of checkpointing: it commits the parts of all ranks, and removes what no checkpoint needs any more.

All ranks receive the result of a checkpoint with a later command. After a failure on any rank, for any reason, the
clients of that checkpoint count as unsaved again on every rank.
"""

import itertools
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_dist.common.errors import FlDistError
from fl_dist.common.files import sync_folder
from fl_dist.common.formatting import pluralize
from fl_dist.distributed import fault_injection
from fl_dist.storage import checkpoint, checkpoint_files
from fl_dist.storage.checkpoint import Checkpoint, CheckpointFailedError, Extra, Index, Manifest, PackEntry, folder_name

log = logging.getLogger(__name__)
ENTRIES_PER_CLIENT, EXTRA_CHECKPOINTS, COMPACTION_INTERVAL = 2, 4, 8
"""Packs may hold ENTRIES_PER_CLIENT entries per client and those of EXTRA_CHECKPOINTS checkpoints. Compaction waits
for those of COMPACTION_INTERVAL more, because the files that it opens cost more than the bytes that it copies."""
COMPACTED_PACK = "clients-carried.pack"
MAX_FILE_CHECKS = 8
"""Earlier checkpoints whose files are looked up per checkpoint, in turn; their folders are looked up each time."""
SYNC_INTERVAL_SECONDS = 1.0
"""Where only rank 0 saves, a checkpoint so soon after a durable one is not synced to disk: a power failure loses it,
and the durable one stays until there is another."""


@dataclass
class RankPart:
    """What a rank wrote of a checkpoint, or why it could not."""

    clients: dict[str, checkpoint.PackPosition] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class CheckpointManager:
    """The thread of rank 0's writer calls it; the training loop pops results and reads attributes."""

    def __init__(
        self, root: Path, run: str, keep: int, start: Checkpoint | None, on_commit: Callable[[], None]
    ) -> None:
        self.root, self.run, self.keep, self._on_commit = root, run, keep, on_commit
        # Single writes by the writer's thread, each before it sets the result; the result itself is under the lock.
        self.committed_round = 0 if start is None else start.manifest.round
        self.committed_count = self.failed_count = 0
        self.last_error = ""
        """Why the last checkpoint failed; empty if it was committed."""
        self.has_missing_files = False
        """Files of earlier checkpoints are missing: the next checkpoint has to save all that the ranks hold."""
        self.unrecoverable_error = ""
        """Why no checkpoint can be complete any more."""
        self._lock, self._result = threading.Lock(), (0, True)
        checkpoint_files.remove_unfinished(root, run)
        checkpoint_files.rename_newer(root, self.committed_round)
        self._manifests = checkpoint.read_manifests(root, run)
        with_server = [m for r, m in self._manifests.items() if (root / folder_name(r) / checkpoint.SERVER).is_file()]
        self._recent: list[Manifest] = with_server[-keep:]
        self._last_durable: Manifest | None = None
        self._last_sync = -math.inf
        self.index: Index = {} if start is None else dict(start.index)
        self._live = Counter(entry.round for entry in self.index.values())
        """Round -> number of clients whose newest variables its packs hold."""
        required = [] if start is None else [self._manifests[r] for r in start.manifest.required_rounds]
        self._entries = deque(item for manifest in required for item in manifest.entries())
        """All entries of the packs, oldest first; some have been written again since."""
        self._next_file_check = 0

    @property
    def is_sync_due(self) -> bool:
        """Whether the next checkpoint has to be durable."""
        return time.monotonic() - self._last_sync > SYNC_INTERVAL_SECONDS

    def pop_result(self) -> tuple[int, bool]:
        """The round of a checkpoint that has ended and whether it is committed, once; otherwise (0, True)."""
        with self._lock:
            result, self._result = self._result, (0, True)
        return result

    def complete(self, round_: int, parts: list[RankPart], extra: Extra, durable: bool = True) -> None:
        """Commit the parts of all ranks, in the order of ranks; a failure is logged and becomes the result."""
        error = ""
        try:
            errors = [f"rank {rank}: {part.error}" for rank, part in enumerate(parts) if part.error]
            if errors:
                raise CheckpointFailedError("; ".join(errors))
            changed = {int(c): PackEntry(round_, *position) for part in parts for c, position in part.clients.items()}
            self._commit(round_, changed, parts[0].server, extra, durable)
        except (OSError, FlDistError) as e:
            error = f"{checkpoint.error_reason(e)} ({self.root})" if isinstance(e, OSError) else str(e)
            log.warning("the checkpoint of round %d could not be written: %s; training continues", round_, error)
        self.finish(round_, error)

    def finish(self, round_: int, error: str) -> None:
        """Set the result of a checkpoint: it has failed with this error unless it is committed."""
        is_committed = self.committed_round == round_
        if not is_committed:
            self.failed_count, self.last_error = self.failed_count + 1, error
        with self._lock:
            self._result = round_, is_committed

    def _commit(self, round_: int, changed: Index, server: dict[str, Any], extra: Extra, durable: bool) -> None:
        self._check_earlier_files(changed)
        copied, obsolete = self._compact(round_, changed)
        changed |= copied
        live = self._live + Counter(entry.round for entry in changed.values())
        live.subtract(self.index[c].round for c in changed if c in self.index)
        history = sorted(r for r, clients in live.items() if clients > 0 and r != round_)
        clients, packs = {str(c): e[1:] for c, e in changed.items()}, sorted({e.pack for e in changed.values()})
        manifest = Manifest(self.run, round_, server, clients, packs, history, extra)
        fault_injection.point("save-manifest")
        if durable:
            sync_folder(self.root)
        manifest.write(self.root, durable)
        if durable:
            self._last_durable, self._last_sync = manifest, time.monotonic()
        self.index |= changed
        for _ in range(obsolete):
            self._entries.popleft()
        self._entries.extend(changed.items())
        self._live, self._manifests[round_] = +live, manifest
        self.committed_round, self.committed_count = round_, self.committed_count + 1
        self.last_error, self.has_missing_files = "", False
        self._clean_up(manifest)

    def _clean_up(self, manifest: Manifest) -> None:
        """After a commit; a failure here does not affect the checkpoint."""
        try:
            (self.root / folder_name(manifest.round) / checkpoint.UNFINISHED_MARKER).unlink(missing_ok=True)
            fault_injection.point("save-switched")
            self._on_commit()
            self._collect_garbage(manifest)
        except OSError as e:
            log.warning("the checkpoint of round %d is complete, but: %s", manifest.round, checkpoint.error_reason(e))

    def _check_earlier_files(self, changed: Index) -> None:
        """Before a checkpoint builds on earlier ones: check that their files exist."""
        if not self._live:
            return
        existing = set(checkpoint.checkpoint_rounds(self.root))
        end = self._next_file_check + MAX_FILE_CHECKS
        for round_ in itertools.islice(self._live, self._next_file_check, end):
            if not checkpoint.files_exist(self.root, self._manifests[round_]):
                existing.discard(round_)
        self._next_file_check = end if end < len(self._live) else 0
        missing = self._live.keys() - existing
        lost = {c for c, entry in self.index.items() if entry.round in missing} - changed.keys() if missing else set()
        if lost and self.has_missing_files:  # all that the ranks hold is in `changed`
            clients = pluralize(len(lost), "client")
            self.unrecoverable_error = (
                f"files in {self.root} are missing, with the variables of {clients} that no rank holds; "
                "restore them, or start again in another run.dir"
            )
            raise CheckpointFailedError(self.unrecoverable_error)
        if lost:
            self.has_missing_files = True
            example = self.root / folder_name(min(missing))
            raise CheckpointFailedError(
                f"files of earlier checkpoints are missing, e.g. of {example}; saving all again"
            )

    def _compact(self, round_: int, changed: Index) -> tuple[Index, int]:
        """Copy the oldest clients, at most as many as changed, to a new pack, so that old packs can be removed.

        Returns their new entries, and how many of the oldest entries are obsolete once these are committed.
        """
        max_entries = ENTRIES_PER_CLIENT * len(self.index) + EXTRA_CHECKPOINTS * len(changed)
        if len(self._entries) <= max_entries + COMPACTION_INTERVAL * len(changed):
            return {}, 0
        oldest: Index = {}
        obsolete = 0
        for client, entry in self._entries:
            if len(self._entries) - obsolete <= max_entries or len(oldest) == len(changed):
                break
            obsolete += 1
            if self.index[client] == entry and client not in changed:
                oldest[client] = entry
        if not oldest:
            return {}, obsolete
        clients = ((client, checkpoint.read_client_bytes(self.root, entry)) for client, entry in oldest.items())
        folder = self.root / folder_name(round_)
        positions = checkpoint_files.write_pack(folder, COMPACTED_PACK, clients)
        return {int(client): PackEntry(round_, *position) for client, position in positions.items()}, obsolete

    def _collect_garbage(self, manifest: Manifest) -> None:
        """Remove files of this run that neither the last `keep` checkpoints nor the last durable one need."""
        manifests = [*self._recent, manifest]
        self._recent = manifests[-self.keep :]
        retained = [*self._recent, *([] if self._last_durable is None else [self._last_durable])]
        required = {round_ for m in retained for round_ in m.required_rounds}
        for old in manifests[: -self.keep]:
            if old.round in required and old is not self._last_durable:  # for its packs
                checkpoint_files.remove_files(self.root / folder_name(old.round), [checkpoint.SERVER])
        for round_ in [r for r in self._manifests if r not in required]:
            checkpoint_files.remove_files(self.root / folder_name(round_), self._manifests.pop(round_).files)
