"""Checkpoints: one folder a save, whole or absent, written while the next round runs.

    checkpoint/latest                       name of the newest whole save, switched last
    checkpoint/round-000012/manifest.json   what belongs to the save, with sizes and SHA-256
    checkpoint/round-000012/server.safetensors, client-000017.safetensors, ...

Each rank writes the clients it holds that have changed; a manifest also names files of earlier saves for those that
have not. A file is removed when no kept manifest names it.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fl_dist import faults
from fl_dist.comm import Comm
from fl_dist.folder import sync_folder, write_atomically

log = logging.getLogger("fl_dist")
NAME = re.compile(r"round-\d{6,}/(server|client-\d{6,})\.safetensors")
CLIENT = re.compile(r"/client-(\d+)\.")
FOLDER = re.compile(r"round-\d{6,}")
Entry = dict[str, Any]


class Damaged(ValueError):
    """A checkpoint file that is not what its manifest says."""


class NoCheckpoint(RuntimeError):
    """A run whose every save failed."""


@dataclass
class Manifest:
    """A whole save: the round it follows, its files, where each client's variables are, and small things."""

    round: int
    files: dict[str, Entry] = field(default_factory=dict)
    clients: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return folder_name(self.round)

    @property
    def server(self) -> str:
        return f"{self.folder}/server.safetensors"

    def encode(self) -> bytes:
        body = json.dumps(vars(self), sort_keys=True)
        return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}, indent=1).encode()

    @staticmethod
    def read(path: Path) -> "Manifest":
        try:
            outer = json.loads(path.read_bytes())
            body = outer["body"]
            if hashlib.sha256(body.encode()).hexdigest() != outer["sha256"]:
                raise Damaged(f"{path} is damaged (its checksum differs)")
            manifest = Manifest(**json.loads(body))
            names = [*manifest.files, *manifest.clients.values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise e if isinstance(e, Damaged) else Damaged(f"{path} cannot be read ({e})") from None
        for name in names:
            if not NAME.fullmatch(name) or name not in manifest.files:
                raise Damaged(f"{path} names a file outside the checkpoints: {name!r}")
        return manifest


def folder_name(round_: int) -> str:
    return f"round-{round_:06d}"


def read_file(root: Path, name: str, entry: Entry) -> dict[str, Tensor]:
    """The tensors of a checkpoint file, after checking its bytes against the manifest."""
    path = root / name
    try:
        data = path.read_bytes()
    except OSError as e:
        raise Damaged(f"{path} cannot be read ({e.strerror})") from None
    if len(data) != entry["bytes"] or hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise Damaged(f"{path} is damaged ({len(data)} bytes, {entry['bytes']} expected, or another checksum)")
    try:
        return load(data)
    except SafetensorError as e:
        raise Damaged(f"{path} is damaged ({e})") from None


def write_file(root: Path, name: str, tensors: dict[str, Tensor]) -> Entry:
    """Write and sync one file; its manifest entry."""
    data = save({n: t.contiguous() for n, t in tensors.items()})
    with open(root / name, "wb") as file:
        file.write(data)
        faults.point("save-file")
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def newest(root: Path, warn: Callable[[str], None]) -> Manifest | None:
    """The newest save whose files are all whole; a damaged one is named and passed over."""
    candidates = sorted((p.parent.name for p in root.glob("round-*/manifest.json")), reverse=True)
    with contextlib.suppress(OSError):
        pointed = (root / "latest").read_text().strip()
        # A save newer than the pointer was not finished.
        candidates = [c for c in candidates if not FOLDER.fullmatch(pointed) or c <= pointed]
    damaged = []
    for name in candidates:
        try:
            manifest = Manifest.read(root / name / "manifest.json")
            for file, entry in manifest.files.items():
                _verify(root, file, entry)
            return manifest
        except Damaged as e:
            warn(f"{e}; trying the checkpoint before it")
            damaged.append(str(e))
    if damaged:
        raise Damaged(f"no whole checkpoint is left: {damaged[0]}; start again in another run.dir")
    return None


def _verify(root: Path, name: str, entry: Entry) -> None:
    path, digest = root / name, hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as e:
        raise Damaged(f"{path} cannot be read ({e.strerror})") from None
    if digest.hexdigest() != entry["sha256"]:
        raise Damaged(f"{path} is damaged (its checksum differs)")


class Saver:
    """Saves in a thread of its own, one at a time; on rank 0 it also completes the save of all ranks."""

    def __init__(self, root: Path, comm: Comm, keep: int, timeout: float) -> None:
        self.root, self.comm, self.keep, self.timeout = root, comm, keep, timeout
        self.made = self.failed = 0
        self.failure = ""
        """Why the last save failed; empty after a good one."""
        self._thread: threading.Thread | None = None
        self._kept: list[Manifest] = []
        self._written: Manifest = Manifest(0)
        self._returned: set[int] = set()
        self._abandoned = threading.Event()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def resume(self, manifest: Manifest | None) -> None:
        """Rank 0: go on from this save; whatever is newer or unfinished is removed."""
        if manifest is not None:
            self._kept = [manifest]
            self._written = Manifest(0, dict(manifest.files), dict(manifest.clients))
            pointer = self.root / "latest"
            if not pointer.exists() or pointer.read_text() != manifest.folder:
                write_atomically(pointer, manifest.folder.encode())
        self._collect()

    def start(
        self,
        round_: int,
        clients: dict[int, dict[str, Tensor]],
        server: dict[str, Tensor] | None,
        extra: dict[str, Any],
    ) -> None:
        """Begin a save of what the arguments hold; nobody may write to these tensors any more."""
        self.join()
        self._thread = threading.Thread(target=self._run, args=(round_, clients, server, extra), daemon=True)
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """End the thread, whatever it waits for: one left behind in the store would crash the interpreter's end."""
        self._abandoned.set()
        self.join()

    def take_back(self) -> set[int]:
        """Clients whose save failed: they are still to be saved."""
        back, self._returned = self._returned, set()
        return back

    def _run(
        self, round_: int, clients: dict[int, Any], server: dict[str, Tensor] | None, extra: dict[str, Any]
    ) -> None:
        mine: dict[str, Any] = {"files": {}, "error": ""}
        try:
            self._write(round_, clients, server, mine["files"])
        except Exception as e:
            self._discard(round_, clients, server is not None)
            self._returned = set(clients)
            reason = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}"
            mine = {"files": {}, "error": f"{reason} ({self.root})"}
        # When the job is lost, the store is too; the save then stays unfinished, as if the process had been killed.
        with contextlib.suppress(RuntimeError):
            self.comm.post(f"save/{round_}/{self.comm.rank}", json.dumps(mine))
            if server is not None:
                self._complete(round_, extra)

    def _write(self, round_: int, clients: dict[int, Any], server: Any, files: dict[str, Entry]) -> None:
        (self.root / folder_name(round_)).mkdir(parents=True, exist_ok=True, mode=0o755)
        faults.point("save-begin")
        if server is not None:
            name = f"{folder_name(round_)}/server.safetensors"
            files[name] = write_file(self.root, name, server)
        for client, tensors in clients.items():
            name = client_file(round_, client)
            files[name] = write_file(self.root, name, tensors)
        sync_folder(self.root / folder_name(round_))
        faults.point("save-written")

    def _discard(self, round_: int, clients: dict[int, Any], server: bool) -> None:
        """Free the space of a save that failed."""
        names = [client_file(round_, c) for c in clients] + [f"{folder_name(round_)}/server.safetensors"] * server
        for name in names:
            with contextlib.suppress(OSError):
                (self.root / name).unlink()

    def _complete(self, round_: int, extra: dict[str, Any]) -> None:
        """Rank 0: when every rank has written, write the manifest and switch the pointer."""
        errors = []
        for rank in range(self.comm.size):
            told = self._await(f"save/{round_}/{rank}")
            errors += [f"rank {rank}: {told['error']}"] if told["error"] else []
            for name, entry in told["files"].items():
                self._written.files[name] = entry
                if match := CLIENT.search(name):
                    self._written.clients[str(int(match[1]))] = name
        if errors:
            self._fail(round_, "; ".join(errors))
            return
        try:
            self._switch(round_, extra)
        except OSError as e:
            self._fail(round_, f"{e.strerror or e} ({self.root})")

    def _await(self, key: str) -> dict[str, Any]:
        end = time.monotonic() + self.timeout
        while (text := self.comm.read(key)) is None:
            if self._abandoned.wait(0.01) or time.monotonic() > end or self.comm.read("failure"):
                raise RuntimeError("the run ended before every rank had saved")
        return json.loads(text)

    def _switch(self, round_: int, extra: dict[str, Any]) -> None:
        known, server = self._written, f"{folder_name(round_)}/server.safetensors"
        files = {name: known.files[name] for name in [server, *known.clients.values()]}
        manifest = Manifest(round_, files, dict(known.clients), extra)
        faults.point("save-manifest")
        write_atomically(self.root / manifest.folder / "manifest.json", manifest.encode())
        faults.point("save-pointer")
        write_atomically(self.root / "latest", manifest.folder.encode())
        faults.point("save-switched")
        self._kept = [*self._kept, manifest][-self.keep :]
        self._written.files = dict(files)
        self.made, self.failure = self.made + 1, ""
        self._collect()

    def _fail(self, round_: int, reason: str) -> None:
        self.failed, self.failure = self.failed + 1, reason
        log.warning("the checkpoint of round %d could not be written: %s; training goes on", round_, reason)

    def _collect(self) -> None:
        """Remove every file that no kept manifest names, and folders that are empty then."""
        named = {name for m in self._kept for name in m.files} | set(self._written.clients.values())
        manifests = {f"{m.folder}/manifest.json" for m in self._kept}
        for folder in self.root.glob("round-*"):
            for file in folder.iterdir():
                if f"{folder.name}/{file.name}" not in named | manifests:
                    with contextlib.suppress(OSError):
                        file.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def client_file(round_: int, client: int) -> str:
    return f"{folder_name(round_)}/client-{client:06d}.safetensors"
