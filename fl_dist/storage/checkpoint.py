"""Checkpoints on disk: one folder each, committed by its manifest; unchanged clients stay in earlier checkpoints.

    checkpoint/round-000012/manifest.json       written last: what this checkpoint wrote, on which others it builds
    checkpoint/round-000012/server.safetensors
    checkpoint/round-000012/clients-2.pack      the clients of rank 2 that had changed, one after another

A client's variables are in the newest of these checkpoints that wrote them. Packs, and the manifests that name them,
are written twice, because later checkpoints build on them: one damaged file loses nothing. Links are never followed.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from fl_dist.common.errors import FlDistError
from fl_dist.common.files import write_atomically

FOLDER_PATTERN = re.compile(r"round-(\d{6,})")
PACK_PATTERN = re.compile(r"clients-(\d+|carried)\.pack")
MANIFEST, MANIFEST_COPY, SERVER = "manifest.json", "manifest.copy.json", "server.safetensors"
UNFINISHED_MARKER = "unfinished"
"""Holds the id of the run until the checkpoint is committed."""
Tensors = dict[str, Tensor]
Extra = dict[str, Any]
"""What else a checkpoint holds, as JSON."""
Warn = Callable[[str], None]
PackPosition = tuple[str, int, int, str]
"""Pack, offset, size and SHA-256 of a client's variables."""


class CorruptCheckpointError(FlDistError):
    """A checkpoint whose files are missing or damaged."""


class CheckpointFailedError(FlDistError):
    """A checkpoint could not be written."""


class PackEntry(NamedTuple):
    """Where a client's variables are."""

    round: int
    pack: str
    offset: int
    size: int
    sha256: str


Index = dict[int, PackEntry]


@dataclass
class Manifest:
    """What one checkpoint wrote, and the rounds of the earlier ones that still hold variables of some clients."""

    run: str
    round: int
    server: dict[str, Any] = field(default_factory=dict)
    clients: dict[str, PackPosition] = field(default_factory=dict)
    packs: list[str] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    extra: Extra = field(default_factory=dict)

    @property
    def required_rounds(self) -> list[int]:
        return [*self.history, self.round]

    @property
    def files(self) -> list[str]:
        """All files of the checkpoint, in the order to remove them: the manifest, which lists them, is last."""
        return [SERVER, UNFINISHED_MARKER, *map(copy_name, self.packs), MANIFEST_COPY, *self.packs, MANIFEST]

    def entries(self) -> Iterator[tuple[int, PackEntry]]:
        for client, position in self.clients.items():
            yield int(client), PackEntry(self.round, *position)

    def write(self, root: Path, durable: bool = True) -> None:
        body = json.dumps(vars(self))  # in the order of the records' keys, as in metrics.jsonl
        data = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}).encode()
        for name in (MANIFEST_COPY, MANIFEST) if self.clients else (MANIFEST,):
            write_atomically(root / folder_name(self.round) / name, data, durable)

    @staticmethod
    def read(root: Path, round_: int) -> "Manifest":
        """The manifest or, if it is damaged, its copy."""
        folder = root / folder_name(round_)
        try:
            return _read_file(folder / MANIFEST, round_)
        except CorruptCheckpointError:
            with contextlib.suppress(CorruptCheckpointError):
                return _read_file(folder / MANIFEST_COPY, round_)
            raise


def _read_file(path: Path, round_: int) -> Manifest:
    try:
        content = json.loads(path.read_bytes())
        if hashlib.sha256(content["body"].encode()).hexdigest() != content["sha256"]:
            raise CorruptCheckpointError(f"{path} is damaged (its checksum differs)")
        manifest = Manifest(**json.loads(content["body"]))
        packs = {pack for pack, *_ in manifest.clients.values()}
        if manifest.round != round_ or packs != set(manifest.packs) or not all(map(PACK_PATTERN.fullmatch, packs)):
            raise CorruptCheckpointError(f"{path} names files that cannot belong to it")
        return manifest
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CorruptCheckpointError(f"{path} cannot be read ({error_reason(e)})") from None


def error_reason(error: Exception) -> str:
    """The cause in a few words, without the path."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if isinstance(error, FlDistError) else f"{type(error).__name__}: {error}"


def folder_name(round_: int) -> str:
    return f"round-{round_:06d}"


def copy_name(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.copy{dot}{suffix}"


def checkpoint_rounds(root: Path) -> list[int]:
    """The rounds of all checkpoint folders, committed or not, in order; links to folders do not count."""
    if not os.path.lexists(root):
        return []
    with os.scandir(root) as entries:
        names = [e.name for e in entries if FOLDER_PATTERN.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(int(name.removeprefix("round-")) for name in names)


def committed_rounds(root: Path) -> list[int]:
    """The rounds that have a manifest or its copy, damaged or not."""
    names = (MANIFEST, MANIFEST_COPY)
    return [r for r in checkpoint_rounds(root) if any(os.path.lexists(root / folder_name(r) / name) for name in names)]


def read_manifests(root: Path, run: str) -> dict[int, Manifest]:
    """The readable manifests of this run, by round."""
    manifests = {}
    for round_ in checkpoint_rounds(root):
        with contextlib.suppress(CorruptCheckpointError):
            manifests[round_] = Manifest.read(root, round_)
    return {round_: manifest for round_, manifest in manifests.items() if manifest.run == run}


def files_exist(root: Path, manifest: Manifest) -> bool:
    """Whether each file on which later checkpoints build exists, or its copy."""
    folder, names = root / folder_name(manifest.round), [MANIFEST, *manifest.packs]
    return all(os.path.exists(folder / name) or os.path.exists(folder / copy_name(name)) for name in names)


@dataclass
class Checkpoint:
    """A committed checkpoint: its manifest, and where every client's variables are."""

    manifest: Manifest
    index: Index


def newest_checkpoint_round(root: Path) -> int:
    """The newest round with a manifest; 0 if there is none."""
    return max(committed_rounds(root), default=0)


def load_checkpoint(root: Path, round_: int) -> Checkpoint:
    """A checkpoint and the positions of all clients; only manifests are read."""
    manifest = Manifest.read(root, round_)
    earlier = [Manifest.read(root, earlier_round) for earlier_round in manifest.history]
    return Checkpoint(manifest, {client: entry for m in [*earlier, manifest] for client, entry in m.entries()})


def newest_checkpoint(root: Path, run: str, warn: Warn) -> Checkpoint | None:
    """The newest checkpoint whose files are all intact; warn of each damaged one and skip it."""
    errors = []
    for round_ in reversed(committed_rounds(root)):
        try:
            checkpoint = load_checkpoint(root, round_)
            if checkpoint.manifest.run != run:
                raise CorruptCheckpointError(f"{root / folder_name(round_)} belongs to another run")
            _verify(root, checkpoint, warn)
            return checkpoint
        except CorruptCheckpointError as e:
            warn(f"{e}; trying the checkpoint before it")
            errors.append(e)
    if errors:
        raise CorruptCheckpointError(f"no complete checkpoint is left: {errors[0]}; start again in another run.dir")
    return None


def _verify(root: Path, checkpoint: Checkpoint, warn: Warn) -> None:
    """Read every file of the checkpoint; restore a damaged pack from its copy."""
    read_server(root, checkpoint.manifest)
    damaged = set()
    for entry in checkpoint.index.values():
        if _read_pack(root, entry, entry.pack) is None:
            read_client(root, entry)
            damaged.add((entry.round, entry.pack))
    for round_, pack in sorted(damaged):
        path = root / folder_name(round_) / pack
        warn(f"{path} is damaged; restoring it from its copy")
        write_atomically(path, path.with_name(copy_name(pack)).read_bytes())


def read_server(root: Path, manifest: Manifest) -> Tensors:
    """The server's variables, if their bytes are those of the manifest."""
    path = root / folder_name(manifest.round) / SERVER
    try:
        data = path.read_bytes()
    except OSError as e:
        raise CorruptCheckpointError(f"{path} cannot be read ({error_reason(e)})") from None
    if hashlib.sha256(data).hexdigest() != manifest.server.get("sha256"):
        raise CorruptCheckpointError(f"{path} is damaged ({len(data)} bytes, {manifest.server.get('bytes')} expected)")
    return _deserialize(path, data)


def read_client(root: Path, entry: PackEntry) -> Tensors:
    return _deserialize(root / folder_name(entry.round) / entry.pack, read_client_bytes(root, entry))


def read_client_bytes(root: Path, entry: PackEntry) -> bytes:
    """A client's serialized variables, from the pack or its copy."""
    for name in (entry.pack, copy_name(entry.pack)):
        data = _read_pack(root, entry, name)
        if data is not None:
            return data
    path = root / folder_name(entry.round) / entry.pack
    raise CorruptCheckpointError(f"{path} is damaged or missing, and so is its copy")


def _read_pack(root: Path, entry: PackEntry, name: str) -> bytes | None:
    """A client's bytes in one file; None unless their checksum is right."""
    with contextlib.suppress(OSError), open(root / folder_name(entry.round) / name, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), entry.size, entry.offset)
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None
    return None


def _deserialize(path: Path, data: bytes) -> Tensors:
    try:
        return load(data)
    except SafetensorError as e:
        raise CorruptCheckpointError(f"{path} is damaged ({e})") from None
