"""Checkpoints on disk: one folder a save, whole or absent; what has not changed stays where an earlier save put it.

    checkpoint/round-000012/manifest.json       what the save wrote, which clients lie where, which saves it builds on
    checkpoint/round-000012/server.safetensors
    checkpoint/round-000012/clients-2.pack      the clients of rank 2 that had changed, one after another

A client's variables are in the newest save, of those that a save builds on, that wrote them. What later saves rely on,
packs and the manifests that name them, is written twice: one damaged file loses nothing. Links are never followed.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fl_dist.machine import faults
from fl_dist.storage.folder import write_atomically

FOLDER = re.compile(r"round-(\d{6,})")
PACK = re.compile(r"clients-(\d+|carried)\.pack")
MANIFEST, SERVER, UNFINISHED = "manifest.json", "server.safetensors", "unfinished"
TORN = ".manifest."
"""How files begin that were to become manifests."""
Tensors = dict[str, Tensor]
Warn = Callable[[str], None]


class Damaged(ValueError):
    """Checkpoint files that are not what they should be."""


class NoCheckpoint(RuntimeError):
    """A run that could not be saved."""


class Entry(NamedTuple):
    """Where a client's variables lie."""

    round: int
    pack: str
    start: int
    bytes: int
    sha256: str


Index = dict[int, Entry]


@dataclass
class Manifest:
    """What one save wrote, and the rounds of the earlier saves in which some clients' variables still lie."""

    run: str
    round: int
    server: dict[str, Any] = field(default_factory=dict)
    clients: dict[str, tuple[str, int, int, str]] = field(default_factory=dict)
    packs: list[str] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> list[int]:
        """Every save that this one needs, in order."""
        return [*self.history, self.round]

    @property
    def files(self) -> list[str]:
        """All that the save put into its folder; last, what tells whose it is."""
        twice = [*self.packs, MANIFEST]
        return [SERVER, UNFINISHED, *map(copy_of, twice), *twice]

    def entries(self) -> Iterator[tuple[int, Entry]]:
        for client, place in self.clients.items():
            yield int(client), Entry(self.round, *place)

    def write(self, root: Path, durable: bool = True) -> None:
        body = json.dumps(vars(self), sort_keys=True)
        data = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}).encode()
        folder = root / folder_name(self.round)
        for name in [copy_of(MANIFEST), MANIFEST] if self.clients else [MANIFEST]:
            write_atomically(os.path.join(folder, name), data, durable)

    @staticmethod
    def read(root: Path, round_: int) -> "Manifest":
        """The manifest of a save, or else its copy; Damaged if neither is whole."""
        problems = []
        for name in (MANIFEST, copy_of(MANIFEST)):
            path = root / folder_name(round_) / name
            try:
                return _checked(path, round_)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
                problems.append(str(e) if isinstance(e, Damaged) else f"{path} cannot be read ({_reason(e)})")
        raise Damaged(problems[0])


def _checked(path: Path, round_: int) -> Manifest:
    outer = json.loads(path.read_bytes())
    body = outer["body"]
    if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
        raise Damaged(f"{path} is damaged (its checksum differs)")
    manifest = Manifest(**json.loads(body))
    used = {pack for pack, *_ in manifest.clients.values()}
    if manifest.round != round_ or used != set(manifest.packs) or not all(map(PACK.fullmatch, used)):
        raise Damaged(f"{path} names what cannot belong to it")
    return manifest


@dataclass
class Save:
    """A whole save: its manifest, and where every client's variables lie."""

    manifest: Manifest
    index: Index


def folder_name(round_: int) -> str:
    return f"round-{round_:06d}"


def copy_of(name: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}.copy{dot}{suffix}"


def rounds_in(root: Path) -> list[int]:
    """The rounds of all folders of saves, in order; not of links to folders."""
    if not os.path.lexists(root):
        return []
    with os.scandir(root) as entries:
        names = [e.name for e in entries if FOLDER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    return sorted(int(name.removeprefix("round-")) for name in names)


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a manifest, or what is left of one."""
    return any(os.path.lexists(folder / name) for name in (MANIFEST, copy_of(MANIFEST)))


def newest_round(root: Path) -> int:
    """The newest save that has a manifest; 0 if there is none."""
    return max((r for r in rounds_in(root) if is_begun(root / folder_name(r))), default=0)


def manifests(root: Path, run: str) -> dict[int, Manifest]:
    """The manifests of all saves of this run, by round."""
    found = {}
    for round_ in rounds_in(root):
        with contextlib.suppress(Damaged):
            manifest = Manifest.read(root, round_)
            if manifest.run == run:
                found[round_] = manifest
    return found


def is_there(root: Path, manifest: Manifest) -> bool:
    """Whether each of the save's files that later saves rely on, or its copy, exists."""
    folder = root / folder_name(manifest.round)
    return all(
        os.path.exists(folder / name) or os.path.exists(folder / copy_of(name)) for name in [MANIFEST, *manifest.packs]
    )


def load_save(root: Path, round_: int) -> Save:
    """A save with the places of all clients; their files are not looked at."""
    last = Manifest.read(root, round_)
    index: Index = {}
    for earlier in last.history:
        index.update(Manifest.read(root, earlier).entries())
    index.update(last.entries())
    return Save(last, index)


def newest(root: Path, run: str, warn: Warn) -> Save | None:
    """The newest save whose files are all whole; a damaged one is named and passed over."""
    problems = []
    for round_ in reversed(rounds_in(root)):
        if not is_begun(root / folder_name(round_)):
            continue
        try:
            found = load_save(root, round_)
            if found.manifest.run != run:
                raise Damaged(f"{root / folder_name(round_)} belongs to another run")
            _verify(root, found, warn)
            return found
        except Damaged as e:
            warn(f"{e}; trying the checkpoint before it")
            problems.append(str(e))
    if problems:
        raise Damaged(f"no whole checkpoint is left: {problems[0]}; start again in another run.dir")
    return None


def _verify(root: Path, found: Save, warn: Warn) -> None:
    """Read everything that the save consists of; a damaged file with a whole copy is mended."""
    read_server(root, found.manifest)
    broken = set()
    for entry in found.index.values():
        if _blob(root, entry, entry.pack) is None:
            read_client(root, entry)
            broken.add((entry.round, entry.pack))
    for round_, pack in sorted(broken):
        path = root / folder_name(round_) / pack
        warn(f"{path} was damaged and is restored from its copy")
        write_atomically(path, path.with_name(copy_of(pack)).read_bytes())


def read_server(root: Path, manifest: Manifest) -> Tensors:
    """The server's variables, after checking their bytes against the manifest."""
    path = root / folder_name(manifest.round) / SERVER
    try:
        data = path.read_bytes()
    except OSError as e:
        raise Damaged(f"{path} cannot be read ({_reason(e)})") from None
    if hashlib.sha256(data).hexdigest() != manifest.server.get("sha256"):
        raise Damaged(f"{path} is damaged ({len(data)} bytes, {manifest.server.get('bytes')} expected)")
    return _tensors(path, data)


def read_client(root: Path, entry: Entry) -> Tensors:
    """A client's variables, from the pack or its copy; Damaged if neither has them whole."""
    path = root / folder_name(entry.round) / entry.pack
    for name in (entry.pack, copy_of(entry.pack)):
        data = _blob(root, entry, name)
        if data is not None:
            return _tensors(path, data)
    raise Damaged(f"{path} is damaged or missing, and so is its copy")


def _blob(root: Path, entry: Entry, name: str) -> bytes | None:
    """A client's bytes in one file, if they are whole."""
    with contextlib.suppress(OSError), open(root / folder_name(entry.round) / name, "rb", buffering=0) as file:
        data = os.pread(file.fileno(), entry.bytes, entry.start)
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None
    return None


def _tensors(path: Path, data: bytes) -> Tensors:
    try:
        return load(data)
    except SafetensorError as e:
        raise Damaged(f"{path} is damaged ({e})") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


def begin(folder: Path, run: str) -> None:
    """A folder for a save, which says whose it is as long as it has no manifest."""
    try:
        os.mkdir(folder, 0o755)
    except OSError:  # another rank was faster, or the folder of all saves is not there
        os.makedirs(folder, 0o755, exist_ok=True)
    with open(os.path.join(folder, UNFINISHED), "wb", buffering=0) as file:
        file.write(run.encode())


def write_server(folder: Path, tensors: Tensors, durable: bool = True) -> dict[str, Any]:
    """Write the server's variables, and sync them if they are to be `durable`; what the manifest says of them."""
    data = save({n: t.contiguous() for n, t in tensors.items()})
    with open(os.path.join(folder, SERVER), "wb") as file:
        file.write(data)
        faults.point("save-file")
        sync(file, durable)
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


class PackWriter:
    """Context: appends clients to a pack and its copy, both on disk at the end; a failure leaves neither."""

    def __init__(self, folder: Path, pack: str) -> None:
        self.pack, self.paths = pack, [folder / pack, folder / copy_of(pack)]
        self.clients: dict[str, tuple[str, int, int, str]] = {}
        self._end = 0

    def __enter__(self) -> "PackWriter":
        self._files = [open(path, "wb") for path in self.paths]  # noqa: SIM115 (closed in __exit__)
        return self

    def add(self, client: int, data: bytes) -> None:
        for file in self._files:
            file.write(data)
        faults.point("save-file")
        self.clients[str(client)] = (self.pack, self._end, len(data), hashlib.sha256(data).hexdigest())
        self._end += len(data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for file in self._files:
                if kind is None:
                    sync(file)
        finally:
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.close()


def packed(tensors: Tensors) -> bytes:
    return save({n: t.contiguous() for n, t in tensors.items()})


def carry(root: Path, clients: dict[int, Entry], writer: PackWriter) -> None:
    """Copy clients' bytes from older packs, each checked on its way."""
    for client, entry in clients.items():
        data = _blob(root, entry, entry.pack) or _blob(root, entry, copy_of(entry.pack))
        if data is None:
            raise Damaged(f"{root / folder_name(entry.round) / entry.pack} is damaged or missing, and so is its copy")
        writer.add(client, data)


def sync(file: IO[bytes], durable: bool = True) -> None:
    file.flush()
    faults.point("sync")
    if durable:
        os.fsync(file.fileno())


def remove(folder: Path, names: list[str]) -> None:
    """Remove these files in their order, and the folder if that leaves it empty; nothing behind a link."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return
        there = os.listdir(folder)
        for name in [*(n for n in there if n.startswith(TORN)), *(n for n in names if n in there)]:
            with contextlib.suppress(FileNotFoundError):  # another rank may be removing it
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def set_aside(root: Path, after: int) -> None:
    """Rename saves newer than the one a run goes on from: they are damaged, and their rounds will be saved again."""
    for round_ in rounds_in(root):
        folder = root / folder_name(round_)
        if round_ > after and is_begun(folder):
            free = next(k for k in itertools.count(1) if not os.path.lexists(f"{folder}.damaged-{k}"))
            os.rename(folder, f"{folder}.damaged-{free}")


def remove_unfinished(root: Path, run: str) -> None:
    """At the start: free the space of this run's saves that were never completed, or never reached the disk."""
    for round_ in rounds_in(root):
        folder = root / folder_name(round_)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            there = os.listdir(folder)
            if not there:
                os.rmdir(folder)
            elif is_begun(folder):
                ours = [SERVER, UNFINISHED, MANIFEST]
                if set(there) <= set(ours) and not (folder / MANIFEST).stat().st_size:
                    remove(folder, ours)
            elif (folder / UNFINISHED).read_text() == run:
                ours = [n for n in there if n == SERVER or PACK.fullmatch(_original(n))]
                remove(folder, [*ours, UNFINISHED])


def _original(name: str) -> str:
    return name.replace(".copy.", ".")
