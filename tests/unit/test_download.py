"""Published data: interrupted downloads, damaged and malicious archives, and the files left afterwards."""

import hashlib
import io
import os
import shutil
import socket
import stat
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_dist.data import datasets, shared_arrays
from fl_dist.data.__main__ import main
from fl_dist.data.download_sources import SOURCES, File, Source
from tests.support.cli import CliResult, make_invoker
from tests.support.data_files import CifarFiles
from tests.support.waiting import free_port

FILES = {"d/a.txt": b"first", "d/sub/b.bin": bytes(range(256)) * 40}


@dataclass
class Web:
    """A local HTTP server: its files, its faults, and the requests it received."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    """The number of bytes after which the connection is closed, once."""
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    def add_file(self, name: str, data: bytes, md5: str = "", contents: tuple[str, ...] = ()) -> File:
        self.files[name] = data
        return File(f"http://127.0.0.1:{self.port}/{name}", md5 or hashlib.md5(data).hexdigest(), contents)


@pytest.fixture
def web() -> Iterator[Web]:
    server_state = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, range_header = self.path.lstrip("/"), self.headers.get("Range", "")
            server_state.requests.append((name, range_header))
            data = server_state.files.get(name)
            if data is None:
                self.send_error(404)
                return
            begin = (
                int(range_header.removeprefix("bytes=").partition("-")[0])
                if range_header and server_state.ranges
                else 0
            )
            if begin and begin >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            body = data[begin : server_state.cut.pop(name, len(data))]
            server_state.sent += len(body)  # before the client can see it
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server_state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server_state
    server.shutdown()
    thread.join()
    server.server_close()


invoke = make_invoker(main)


def fetch_error(*arguments: str | Path, code: int = 2) -> str:
    result = invoke(*arguments)
    errors = [line for line in result.err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert result.code == code and len(errors) == 1 and result.err.rstrip("\n").endswith(errors[0]), result
    assert "Traceback" not in result.err and len(errors[0]) < 400
    return errors[0]


def fetch(name: str, root: Path, *more: str) -> CliResult:
    result = invoke("fetch", name, "--root", root, *more)
    assert result.code == 0 and "error" not in result.err, result
    return result


def make_tar(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for member in more:
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def make_zip(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, target in (links or {}).items():
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, target)
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


ARCHIVES: dict[str, Callable[[dict[str, bytes]], bytes]] = {"x.tar.gz": make_tar, "x.zip": make_zip, "x.tgz": make_tar}


def visible_files(folder: Path) -> dict[str, bytes]:
    """All visible files; names that begin with a dot are internal."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = {path.relative_to(folder): path for path in files}
    return {
        str(name): path.read_bytes()
        for name, path in relative.items()
        if not any(part.startswith(".") for part in name.parts)
    }


SetSource = Callable[..., None]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> SetSource:
    def set_source(*files: File, name: str = "cifar10", folder: str = ".", rows: tuple[int, int] | None = None) -> None:
        monkeypatch.setitem(SOURCES, name, Source("A set", folder, files, rows))

    return set_source


class TestFetch:
    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    @pytest.mark.parametrize("folder", [".", "In/here"])
    def test_an_archive_is_extracted_below_root(
        self, name: str, folder: str, web: Web, source: SetSource, tmp_path: Path
    ) -> None:
        source(web.add_file(name, ARCHIVES[name](FILES)), folder=folder)
        fetch("cifar10", tmp_path / "root")
        stored = visible_files(tmp_path / "root" / folder)
        assert {key: stored.get(key) for key in FILES} == FILES
        assert stored.keys() - FILES.keys() <= {name}, "no other file"

    def test_plain_files_are_stored_unchanged(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        first, second = os.urandom(5000), b"1,a,b\n"
        source(web.add_file("a.gz", first), web.add_file("b.csv", second), name="ag_news", folder="deep/er")
        fetch("ag_news", tmp_path)
        assert visible_files(tmp_path / "deep/er") == {"a.gz": first, "b.csv": second}

    def test_a_fetched_data_set_can_be_read(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        cifar = CifarFiles(10, False)
        cifar.write(tmp_path / "source")
        source(web.add_file("cifar.tar.gz", make_tar(visible_files(tmp_path / "source"))), rows=(35, 7))
        fetch("cifar10", tmp_path / "root")
        assert cifar.equals(datasets.build("cifar10", {"root": str(tmp_path / "root")}))

    def test_existing_files_are_not_downloaded_again(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        source(
            web.add_file("x.tar.gz", make_tar(FILES), contents=("d",)),
            web.add_file("y.zip", make_zip({"e/c": b"c", "f": b"f"}), contents=("e", "f")),
            web.add_file("z.csv", b"z"),
        )
        fetch("cifar10", tmp_path)
        before = len(web.requests)
        result = fetch("cifar10", tmp_path)
        assert len(web.requests) == before == 3
        assert "there" in result.out + result.err or "--again" in result.out + result.err

    def test_removed_files_are_fetched_again(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        """Readers report missing files and name this command."""
        source(web.add_file("x.tar.gz", make_tar(FILES), contents=("d",)), web.add_file("z.csv", b"z"))
        fetch("cifar10", tmp_path)
        shutil.rmtree(tmp_path / "d")
        (tmp_path / "z.csv").unlink()
        fetch("cifar10", tmp_path)
        assert visible_files(tmp_path) == FILES | {"z.csv": b"z"}

    def test_again_replaces_existing_files(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        source(web.add_file("x.tar.gz", make_tar(FILES)), web.add_file("z.csv", b"z"))
        fetch("cifar10", tmp_path)
        (tmp_path / "d/a.txt").write_bytes(b"damaged")
        (tmp_path / "mine.txt").write_text("mine")
        source(web.add_file("x.tar.gz", make_tar(FILES | {"d/a.txt": b"newer"})), web.add_file("z.csv", b"zz"))
        fetch("cifar10", tmp_path, "--again")
        stored = visible_files(tmp_path)
        assert (
            stored["d/a.txt"] == b"newer" and stored["d/sub/b.bin"] == FILES["d/sub/b.bin"] and stored["z.csv"] == b"zz"
        )
        assert stored["mine.txt"] == b"mine", "other files are kept"

    def test_a_failed_again_keeps_the_existing_files(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        source(web.add_file("x.tar.gz", make_tar(FILES)))
        fetch("cifar10", tmp_path)
        source(web.add_file("x.tar.gz", make_tar(FILES | {"d/a.txt": b"newer"}), md5="0" * 32))
        fetch_error("fetch", "cifar10", "--root", tmp_path, "--again")
        stored = visible_files(tmp_path)
        assert {key: stored.get(key) for key in FILES} == FILES

    def test_the_folder_is_printed(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        source(web.add_file("x.zip", make_zip(FILES)))
        result = fetch("cifar10", tmp_path / "root")
        assert str(tmp_path / "root") in result.out + result.err


class TestInterruptedDownloads:
    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.csv"])
    def test_an_interrupted_download_resumes(self, name: str, web: Web, source: SetSource, tmp_path: Path) -> None:
        files = FILES | {"d/noise": os.urandom(300_000)}
        data = ARCHIVES[name](files) if name in ARCHIVES else files["d/noise"]
        source(web.add_file(name, data))
        web.cut[name] = len(data) // 2
        text = fetch_error("fetch", "cifar10", "--root", tmp_path)
        assert "same command" in text or "again" in text
        assert visible_files(tmp_path).keys() <= {f"{name}.part"}, "no file that a reader would accept"
        assert "Range" not in text
        fetch("cifar10", tmp_path)
        assert web.sent == len(data), "no byte was sent twice"
        assert web.requests[0] == (name, "") and web.requests[-1] == (name, f"bytes={len(data) // 2}-")
        stored = visible_files(tmp_path)
        assert stored == {name: data} if name == "x.csv" else {k: stored.get(k) for k in files} == files
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]

    def test_a_download_may_be_interrupted_repeatedly(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        data = os.urandom(100_000)
        source(web.add_file("x.csv", data))
        for end in (10, 40_000, 99_999):
            web.cut["x.csv"] = end
            fetch_error("fetch", "cifar10", "--root", tmp_path)
        fetch("cifar10", tmp_path)
        assert visible_files(tmp_path) == {"x.csv": data} and web.sent == len(data)

    def test_without_range_support_the_download_restarts(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        data = os.urandom(100_000)
        source(web.add_file("x.csv", data))
        web.ranges, web.cut["x.csv"] = False, 60_000
        fetch_error("fetch", "cifar10", "--root", tmp_path)
        fetch("cifar10", tmp_path)
        assert visible_files(tmp_path) == {"x.csv": data} and web.sent == 160_000

    def test_a_file_that_changed_on_the_server_is_not_mixed(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        """A mix of old and new bytes is refused, and the next attempt starts over."""
        old, new = os.urandom(50_000), os.urandom(50_000)
        source(web.add_file("x.csv", old))
        web.cut["x.csv"] = 20_000
        fetch_error("fetch", "cifar10", "--root", tmp_path)
        source(web.add_file("x.csv", new))
        if invoke("fetch", "cifar10", "--root", tmp_path).code:
            assert "x.csv" not in visible_files(tmp_path)
            fetch("cifar10", tmp_path)
        assert visible_files(tmp_path) == {"x.csv": new}

    def test_a_complete_partial_file_is_used(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        """Killed between download and extraction: the partial file is complete."""
        data = os.urandom(50_000)
        source(web.add_file("x.csv", data + b"more"))
        web.cut["x.csv"] = len(data)
        fetch_error("fetch", "cifar10", "--root", tmp_path)
        source(web.add_file("x.csv", data))
        if invoke("fetch", "cifar10", "--root", tmp_path).code:
            fetch("cifar10", tmp_path)
        assert visible_files(tmp_path) == {"x.csv": data}

    def test_partial_files_of_the_same_name_are_not_mixed(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        """MNIST and Fashion-MNIST share file names: one was interrupted, the other is fetched into the same root."""
        one, two = os.urandom(50_000), os.urandom(60_000)
        source(web.add_file("one/x.gz", one), name="mnist", folder="one")
        source(web.add_file("two/x.gz", two), name="fashion_mnist", folder="two")
        web.cut["one/x.gz"] = 20_000
        fetch_error("fetch", "mnist", "--root", tmp_path)
        fetch("fashion_mnist", tmp_path)
        fetch("mnist", tmp_path)
        assert visible_files(tmp_path) == {"one/x.gz": one, "two/x.gz": two}

    def test_only_missing_files_are_downloaded(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        first, second = web.add_file("a.csv", b"a" * 1000), web.add_file("b.zip", make_zip(FILES), contents=("d",))
        source(first, second)
        data = web.files.pop("b.zip")
        assert "b.zip" in fetch_error("fetch", "cifar10", "--root", tmp_path)
        web.files["b.zip"] = data
        fetch("cifar10", tmp_path)
        assert [name for name, _ in web.requests] == ["a.csv", "b.zip", "b.zip"]

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.csv"])
    def test_a_wrong_checksum_is_refused_and_removed(
        self, name: str, web: Web, source: SetSource, tmp_path: Path
    ) -> None:
        data = ARCHIVES[name](FILES) if name in ARCHIVES else b"text"
        source(web.add_file(name, data, md5=hashlib.md5(b"other").hexdigest()))
        text = fetch_error("fetch", "cifar10", "--root", tmp_path)
        assert name in text and ("md5" in text.lower() or "checksum" in text.lower())
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
        source(web.add_file(name, data))
        fetch("cifar10", tmp_path)
        assert web.requests[-1] == (name, ""), "from the beginning"

    def test_a_missing_file_on_the_server_is_named(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        file = web.add_file("x.zip", b"")
        del web.files["x.zip"]
        source(file)
        text = fetch_error("fetch", "cifar10", "--root", tmp_path / "root")
        assert "404" in text and file.url in text
        assert visible_files(tmp_path) == {}

    def test_an_unreachable_server_is_named(self, source: SetSource, tmp_path: Path) -> None:
        url = f"http://127.0.0.1:{free_port()}/x.zip"
        source(File(url, "0" * 32))
        assert url in fetch_error("fetch", "cifar10", "--root", tmp_path)

    def test_a_server_that_does_not_speak_http_is_an_error(self, source: SetSource, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            source(File(f"http://127.0.0.1:{listener.getsockname()[1]}/x.zip", "0" * 32))
            fetch_error("fetch", "cifar10", "--root", tmp_path)
            thread.join()

    def test_an_unwritable_root_is_named(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        source(web.add_file("x.zip", make_zip(FILES)))
        assert "file" in fetch_error("fetch", "cifar10", "--root", tmp_path / "file")

    def test_manual_and_unknown_data_sets_are_explained(self, tmp_path: Path) -> None:
        text = fetch_error("fetch", "pacs", "--root", tmp_path)
        assert "https://" in text and "PACS" in text
        result = invoke("fetch", "cifar11", "--root", str(tmp_path))
        assert result.code == 2 and "cifar10" in result.err and "Traceback" not in result.err


class TestArchives:
    """No archive may write outside the root or be extracted partially."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "mine").write_text("mine")
        return folder

    def check_harmless(self, web: Web, source: SetSource, outside: Path, name: str, data: bytes) -> None:
        root = outside.parent / "root"
        shutil.rmtree(root, ignore_errors=True)
        source(web.add_file(name, data))
        result = invoke("fetch", "cifar10", "--root", root)
        assert result.code in (0, 2) and "Traceback" not in result.err
        if result.code:
            assert result.err.count("error: ") == 1
            assert visible_files(root).keys() <= {name}, "all or nothing"
        assert visible_files(outside) == {"mine": b"mine"}
        assert {path.name for path in outside.parent.iterdir()} <= {"outside", "root"}
        for path in root.rglob("*"):
            assert path.resolve().is_relative_to(root.resolve()), f"{path} leads outside"

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    @pytest.mark.parametrize(
        "member",
        ["../evil", "../outside/mine", "d/../../outside/mine", "{}/mine", "..", "./../evil", "d/../../../evil"],
    )
    def test_member_names_outside_the_root_are_harmless(
        self, name: str, member: str, web: Web, source: SetSource, outside: Path
    ) -> None:
        data = ARCHIVES[name]({"d/a.txt": b"a", member.format(outside): b"evil", "d/z.txt": b"z"})
        self.check_harmless(web, source, outside, name, data)
        assert not (outside.parent.parent / "evil").exists()

    @pytest.mark.parametrize("target", ["../outside", "{}", "../../outside", "d/../../outside"])
    def test_links_outside_the_root_are_harmless(self, target: str, web: Web, source: SetSource, outside: Path) -> None:
        target = target.format(outside)
        files = {"d/a.txt": b"a", "d/link/mine": b"evil", "link/mine": b"evil", "link/new": b"evil"}
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            data = make_tar(files, link("d/link", target, kind), link("link", target, kind))
            self.check_harmless(web, source, outside, "x.tar.gz", data)
        self.check_harmless(web, source, outside, "x.zip", make_zip(files, {"d/link": target, "link": target}))

    def test_a_link_to_an_outside_file_is_harmless(self, web: Web, source: SetSource, outside: Path) -> None:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            for target in (str(outside / "mine"), "../outside/mine"):
                self.check_harmless(web, source, outside, "x.tar.gz", make_tar({"m": b"evil"}, link("m", target, kind)))

    def test_devices_and_pipes_are_not_extracted(self, web: Web, source: SetSource, outside: Path) -> None:
        for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE):
            self.check_harmless(web, source, outside, "x.tar.gz", make_tar({"d/a": b"a"}, link("d/special", "", kind)))
            assert not (outside.parent / "root/d/special").exists()

    def test_an_existing_link_in_the_root_is_not_followed(self, web: Web, source: SetSource, outside: Path) -> None:
        """Users link data on other disks; an archive must not overwrite the targets."""
        root = outside.parent / "root"
        root.mkdir()
        source(web.add_file("x.tar.gz", make_tar(FILES)))
        (root / "mine.txt").symlink_to(outside / "mine")
        fetch("cifar10", root)
        assert visible_files(outside) == {"mine": b"mine"}

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    def test_a_damaged_archive_is_not_partially_extracted(
        self, name: str, web: Web, source: SetSource, tmp_path: Path
    ) -> None:
        """Its checksum matches, but it is truncated or damaged."""
        arguments = " ".join(map(str, np.random.default_rng(0).integers(0, 99, 20_000))).encode()
        archive_bytes = ARCHIVES[name]({"d/a.txt": b"a" * 100, "d/words": arguments, "d/z": b"z"})
        damaged = [archive_bytes[: len(archive_bytes) // 2], b"", b"no archive at all"]
        if name.endswith(".zip"):  # zip has its own checksums
            damaged += [
                archive_bytes[:k] + bytes([archive_bytes[k] ^ 0xFF]) + archive_bytes[k + 1 :]
                for k in range(500, 20_000, 3000)
            ]
        for k, data in enumerate(damaged):
            source(web.add_file(name, data))
            text = fetch_error("fetch", "cifar10", "--root", tmp_path / str(k))
            assert f"{name} cannot be extracted" in text
            assert visible_files(tmp_path / str(k)).keys() <= {name}

    def test_an_archive_that_conflicts_with_a_folder_is_not_extracted(
        self, web: Web, source: SetSource, tmp_path: Path
    ) -> None:
        """A folder of this name already exists."""
        (tmp_path / "e").mkdir()
        (tmp_path / "e/mine").write_text("mine")
        source(web.add_file("x.tar.gz", make_tar(FILES | {"e/b": b"b"})))
        assert str(tmp_path / "e") in fetch_error("fetch", "cifar10", "--root", tmp_path)
        assert visible_files(tmp_path) == {"e/mine": b"mine"}
        fetch("cifar10", tmp_path, "--again")
        assert visible_files(tmp_path)["e/b"] == b"b"

    def test_readers_never_see_a_partial_folder(self, web: Web, source: SetSource, tmp_path: Path) -> None:
        """A folder appears with all its files or not at all."""
        files = {f"d/{k:04d}": b"x" * 50 for k in range(600)}
        source(web.add_file("x.tar.gz", make_tar(files)))
        counts: set[int] = set()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                counts.add(len(os.listdir(tmp_path / "d")) if (tmp_path / "d").exists() else 0)
                time.sleep(0.0002)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            fetch("cifar10", tmp_path)
        finally:
            done.set()
            thread.join()
        assert counts <= {0, 600} and len(visible_files(tmp_path / "d")) == 600


class TestCheck:
    def test_check_counts_rows_and_compares_them(self, source: SetSource, tmp_path: Path) -> None:
        CifarFiles(10, False).write(tmp_path)
        source(File("http://127.0.0.1/x", ""), rows=(35, 7))
        result = invoke("check", "cifar10", "--root", tmp_path)
        assert result.code == 0, result
        assert {"35", "7", "10"} <= set(result.out.replace(",", " ").replace(":", " ").split()), result.out

    def test_check_reports_unpublished_row_counts(self, tmp_path: Path) -> None:
        CifarFiles(10, False).write(tmp_path)
        result = invoke("check", "cifar10", "--root", tmp_path)
        text = (result.out + result.err).replace(",", "")
        assert result.code != 0 and "Traceback" not in text
        assert "35" in text and "50000" in text and "10000" in text, text

    def test_missing_and_damaged_files_are_one_line(self, tmp_path: Path) -> None:
        assert "fl-dist data fetch cifar10" in fetch_error("check", "cifar10", "--root", tmp_path)
        CifarFiles(10, False).write(tmp_path)
        file = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
        file.write_bytes(file.read_bytes()[:-1])
        assert "data_batch_2.bin is damaged" in fetch_error("check", "cifar10", "--root", tmp_path)

    def test_check_reads_the_files_not_the_cache(self, tmp_path: Path) -> None:
        for domain in ("art", "photo"):
            (tmp_path / "PACS" / domain / "dog").mkdir(parents=True)
            Image.new("RGB", (20, 20)).save(tmp_path / "PACS" / domain / "dog" / "1.jpg")
        text = fetch_error("check", "pacs", "--root", tmp_path)
        assert "the published data has 9,991 images in all domains, this has 2" in text
        image = tmp_path / "PACS" / "photo" / "dog" / "1.jpg"
        image.write_bytes(image.read_bytes()[:100])
        assert "photo/dog/1.jpg cannot be read" in fetch_error("check", "pacs", "--root", tmp_path)


class TestExistingFiles:
    def test_every_archive_names_its_contents(self) -> None:
        archives = [f for s in SOURCES.values() for f in s.files if f.name.endswith((".tar.gz", ".tgz", ".zip"))]
        assert len(archives) > 5 and all(file.contents for file in archives)

    def test_copied_files_are_not_fetched(self, tmp_path: Path) -> None:
        for name in ("cifar-10-batches-bin", "MNIST/raw"):
            (tmp_path / name).mkdir(parents=True)
        for part in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                (tmp_path / "MNIST" / "raw" / f"{part}-{kind}-ubyte").touch()
        assert "already there" in fetch("cifar10", tmp_path).out
        assert fetch("mnist", tmp_path).out.count("already there") == 4


class TestShow:
    def test_show_prints_sizes_and_plots_classes(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text(
            "partition: {name: shards, per_client: 2}\nclients: {total: 8, per_round: 2}\n"
        )
        result = invoke("show", tmp_path / "c.yaml", "-o", tmp_path / "x.png")
        assert result.code == 0, result
        rows = len(np.load(Path(shared_arrays.__file__).parent / "digits.npz")["y_train"])
        arguments = result.out.replace(",", "").split()
        assert "8" in arguments and str(rows) in arguments, result.out
        pixels = np.asarray(Image.open(tmp_path / "x.png").convert("RGB")).reshape(-1, 3)
        assert len(pixels) > 50_000 and len(np.unique(pixels, axis=0)) > 20

    def test_show_applies_overrides(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("clients: {total: 8, per_round: 2}\n")
        few, more = (invoke("show", tmp_path / "c.yaml", "partition=iid", f"clients.total={n}") for n in (8, 13))
        assert few.code == more.code == 0 and "13" in more.out and few.out != more.out

    def test_errors_are_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("clients: {total: 8, per_round: 2}\n")
        assert "x.doc" in fetch_error("show", tmp_path / "c.yaml", "-o", tmp_path / "x.doc")
        assert "did you mean 'total'" in fetch_error("show", tmp_path / "c.yaml", "clients.totl=3")
        assert "none.yaml" in fetch_error("show", tmp_path / "none.yaml")


class TestCache:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("FL_DIST_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_the_cache_is_listed_and_cleared(self, cache: Path, tmp_path: Path) -> None:
        assert invoke("cache").code == 0, "the cache is empty"
        file = tmp_path / "file"
        file.write_text("x")

        def build(allocate: shared_arrays.Allocate) -> None:
            allocate("x", (1000, 100), np.int64)[:] = 1

        shared_arrays.load_or_build("numbers", [file], None, build)
        result = invoke("cache")
        assert result.code == 0 and "numbers-" in result.out and str(cache) in result.out and "kB" in result.out
        (cache / "mine.txt").write_text("mine")
        assert invoke("cache", "--clear").code == 0
        assert "numbers-" not in invoke("cache").out and shared_arrays.list_cache() == []
        assert (cache / "mine.txt").read_text() == "mine" and file.exists(), "only files of the program are removed"
        assert invoke("cache", "--clear").code == 0
