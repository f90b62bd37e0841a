"""Writing and removing the files of a checkpoint."""

import contextlib
import errno
import hashlib
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from safetensors.torch import save

from fl_dist.distributed import fault_injection
from fl_dist.storage import checkpoint
from fl_dist.storage.checkpoint import PACK_PATTERN, SERVER, UNFINISHED_MARKER, Tensors, copy_name, folder_name

TEMPORARY_MANIFEST_PREFIX = ".manifest."


def serialize(tensors: Tensors) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


def create_folder(folder: Path, run: str) -> None:
    """The folder of a checkpoint, marked as unfinished and as this run's."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a symbolic link; remove it", str(folder))
    os.makedirs(folder, 0o755, exist_ok=True)
    (folder / UNFINISHED_MARKER).write_text(run)


def write_server(folder: Path, tensors: Tensors, durable: bool) -> dict[str, Any]:
    """Write the server's variables; return their entry in the manifest."""
    data = serialize(tensors)
    with open(folder / SERVER, "wb") as file:
        file.write(data)
        fault_injection.point("save-file")
        sync(file, durable)
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}


def write_pack(folder: Path, pack: str, clients: Iterable[tuple[int, bytes]]) -> dict[str, checkpoint.PackPosition]:
    """Write clients to a pack and its copy, both synced to disk; return their positions."""
    positions: dict[str, checkpoint.PackPosition] = {}
    offset = 0
    with open(folder / pack, "wb") as first, open(folder / copy_name(pack), "wb") as second:
        for client, data in clients:
            first.write(data)
            second.write(data)
            fault_injection.point("save-file")
            positions[str(client)] = (pack, offset, len(data), hashlib.sha256(data).hexdigest())
            offset += len(data)
        sync(first)
        sync(second)
    return positions


def sync(file: IO[bytes], durable: bool = True) -> None:
    file.flush()
    fault_injection.point("sync")
    if durable:
        os.fsync(file.fileno())


def remove_files(folder: Path, names: list[str]) -> None:
    """Remove these files in this order, then the folder if it is empty; never follow a link."""
    with contextlib.suppress(OSError):
        if folder.is_symlink():
            return
        existing = os.listdir(folder)
        temporary = [name for name in existing if name.startswith(TEMPORARY_MANIFEST_PREFIX)]
        for name in [*temporary, *(name for name in names if name in existing)]:
            (folder / name).unlink(missing_ok=True)  # another rank may be removing it
        os.rmdir(folder)


def rename_newer(root: Path, last_round: int) -> None:
    """Rename the checkpoints after the one that a run resumes from: they are damaged, and will be written again."""
    for round_ in checkpoint.committed_rounds(root):
        folder = root / folder_name(round_)
        if round_ > last_round:
            number = next(k for k in itertools.count(1) if not os.path.lexists(f"{folder}.damaged-{k}"))
            os.rename(folder, f"{folder}.damaged-{number}")


def remove_unfinished(root: Path, run: str) -> None:
    """Remove this run's checkpoints that were never committed, and those whose manifest a power failure emptied."""
    committed = checkpoint.committed_rounds(root)
    for round_ in checkpoint.checkpoint_rounds(root):
        folder = root / folder_name(round_)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            existing = os.listdir(folder)
            if not existing:
                os.rmdir(folder)
            elif round_ in committed:
                names = [SERVER, UNFINISHED_MARKER, checkpoint.MANIFEST]
                if set(existing) <= set(names) and not (folder / checkpoint.MANIFEST).stat().st_size:
                    remove_files(folder, names)
            elif (folder / UNFINISHED_MARKER).read_text() == run:
                names = [n for n in existing if n == SERVER or PACK_PATTERN.fullmatch(n.replace(".copy.", "."))]
                remove_files(folder, [*names, UNFINISHED_MARKER])
