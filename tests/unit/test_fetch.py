"""Published data: downloads that break off, archives that are not what they should be, and what is there afterwards."""

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

from fl_dist.data import datasets, shared
from fl_dist.data.__main__ import main
from fl_dist.data.sources import SOURCES, File, Source
from tests.support.data_files import Cifar
from tests.support.programs import Said, asker
from tests.support.waiting import free_port

FILES = {"d/a.txt": b"first", "d/sub/b.bin": bytes(range(256)) * 40}


@dataclass
class Web:
    """A server on this machine: what it has, how it misbehaves, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    """Bytes after which the connection is closed, once."""
    ranges: bool = True
    requests: list[tuple[str, str]] = field(default_factory=list)
    sent: int = 0
    port: int = 0

    def has(self, name: str, data: bytes, md5: str = "") -> File:
        self.files[name] = data
        return File(f"http://127.0.0.1:{self.port}/{name}", md5 or hashlib.md5(data).hexdigest())


@pytest.fixture
def web() -> Iterator[Web]:
    it = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.lstrip("/"), self.headers.get("Range", "")
            it.requests.append((name, asked))
            data = it.files.get(name)
            if data is None:
                self.send_error(404)
                return
            begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked and it.ranges else 0
            if begin and begin >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if begin else 200)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - begin))
            self.end_headers()
            body = data[begin : it.cut.pop(name, len(data))]
            it.sent += len(body)  # before the other end can know of it
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    it.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield it
    server.shutdown()
    thread.join()
    server.server_close()


asked = asker(main)


def refused(*words: str | Path, code: int = 2) -> str:
    said = asked(*words)
    errors = [line for line in said.err.replace("\r", "\n").splitlines() if line.startswith("error: ")]
    assert said.code == code and len(errors) == 1 and said.err.rstrip("\n").endswith(errors[0]), said
    assert "Traceback" not in said.err and len(errors[0]) < 400
    return errors[0]


def fetched(name: str, root: Path, *more: str) -> Said:
    said = asked("fetch", name, "--root", root, *more)
    assert said.code == 0 and "error" not in said.err, said
    return said


def tar(files: dict[str, bytes], *more: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for member in more:
            archive.addfile(member)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return made.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def packed(files: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, target in (links or {}).items():
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            archive.writestr(entry, target)
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return made.getvalue()


ARCHIVES: dict[str, Callable[[dict[str, bytes]], bytes]] = {"x.tar.gz": tar, "x.zip": packed, "x.tgz": tar}


def below(folder: Path) -> dict[str, bytes]:
    """Files that a reader may meet; what begins with a dot is the program's own."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    relative = {path.relative_to(folder): path for path in files}
    return {
        str(name): path.read_bytes()
        for name, path in relative.items()
        if not any(part.startswith(".") for part in name.parts)
    }


Sets = Callable[..., None]


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Sets:
    def put(*files: File, name: str = "cifar10", folder: str = ".", rows: tuple[int, int] | None = None) -> None:
        monkeypatch.setitem(SOURCES, name, Source("A set", folder, files, "", rows))

    return put


class TestArrival:
    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    @pytest.mark.parametrize("folder", [".", "In/here"])
    def test_an_archive_is_extracted_below_root(
        self, name: str, folder: str, web: Web, source: Sets, tmp_path: Path
    ) -> None:
        source(web.has(name, ARCHIVES[name](FILES)), folder=folder)
        fetched("cifar10", tmp_path / "root")
        found = below(tmp_path / "root" / folder)
        assert {key: found.get(key) for key in FILES} == FILES
        assert found.keys() - FILES.keys() <= {name}, "nothing else lies there"

    def test_plain_files_arrive_as_they_are(self, web: Web, source: Sets, tmp_path: Path) -> None:
        first, second = os.urandom(5000), b"1,a,b\n"
        source(web.has("a.gz", first), web.has("b.csv", second), name="ag_news", folder="deep/er")
        fetched("ag_news", tmp_path)
        assert below(tmp_path / "deep/er") == {"a.gz": first, "b.csv": second}

    def test_what_arrives_can_be_read(self, web: Web, source: Sets, tmp_path: Path) -> None:
        cifar = Cifar(10, False)
        cifar.write(tmp_path / "made")
        source(web.has("cifar.tar.gz", tar(below(tmp_path / "made"))), rows=(35, 7))
        fetched("cifar10", tmp_path / "root")
        assert cifar.holds(datasets.build("cifar10", {"root": str(tmp_path / "root")}))

    def test_what_is_there_is_not_downloaded_again(self, web: Web, source: Sets, tmp_path: Path) -> None:
        source(web.has("x.tar.gz", tar(FILES)), web.has("y.zip", packed({"e/c": b"c"})), web.has("z.csv", b"z"))
        fetched("cifar10", tmp_path)
        before = len(web.requests)
        said = fetched("cifar10", tmp_path)
        assert len(web.requests) == before == 3
        assert "there" in said.out + said.err or "--again" in said.out + said.err

    def test_what_was_removed_is_fetched_anew(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """Readers say that it is missing, and name this command."""
        source(web.has("x.tar.gz", tar(FILES)), web.has("z.csv", b"z"))
        fetched("cifar10", tmp_path)
        shutil.rmtree(tmp_path / "d")
        (tmp_path / "z.csv").unlink()
        fetched("cifar10", tmp_path)
        assert below(tmp_path) == FILES | {"z.csv": b"z"}

    def test_again_replaces_it(self, web: Web, source: Sets, tmp_path: Path) -> None:
        source(web.has("x.tar.gz", tar(FILES)), web.has("z.csv", b"z"))
        fetched("cifar10", tmp_path)
        (tmp_path / "d/a.txt").write_bytes(b"damaged")
        (tmp_path / "mine.txt").write_text("mine")
        source(web.has("x.tar.gz", tar(FILES | {"d/a.txt": b"newer"})), web.has("z.csv", b"zz"))
        fetched("cifar10", tmp_path, "--again")
        found = below(tmp_path)
        assert found["d/a.txt"] == b"newer" and found["d/sub/b.bin"] == FILES["d/sub/b.bin"] and found["z.csv"] == b"zz"
        assert found["mine.txt"] == b"mine", "what else lies there stays"

    def test_again_that_fails_leaves_what_was_there(self, web: Web, source: Sets, tmp_path: Path) -> None:
        source(web.has("x.tar.gz", tar(FILES)))
        fetched("cifar10", tmp_path)
        source(web.has("x.tar.gz", tar(FILES | {"d/a.txt": b"newer"}), md5="0" * 32))
        refused("fetch", "cifar10", "--root", tmp_path, "--again")
        found = below(tmp_path)
        assert {key: found.get(key) for key in FILES} == FILES

    def test_the_folder_is_said(self, web: Web, source: Sets, tmp_path: Path) -> None:
        source(web.has("x.zip", packed(FILES)))
        said = fetched("cifar10", tmp_path / "root")
        assert str(tmp_path / "root") in said.out + said.err


class TestBreaks:
    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.csv"])
    def test_a_download_that_broke_off_goes_on(self, name: str, web: Web, source: Sets, tmp_path: Path) -> None:
        files = FILES | {"d/noise": os.urandom(300_000)}
        data = ARCHIVES[name](files) if name in ARCHIVES else files["d/noise"]
        source(web.has(name, data))
        web.cut[name] = len(data) // 2
        text = refused("fetch", "cifar10", "--root", tmp_path)
        assert "same command" in text or "again" in text
        assert below(tmp_path).keys() <= {f"{name}.part"}, "nothing that a reader takes for data"
        assert "Range" not in text
        fetched("cifar10", tmp_path)
        assert web.sent == len(data), "no byte was sent twice"
        assert web.requests[0] == (name, "") and web.requests[-1] == (name, f"bytes={len(data) // 2}-")
        found = below(tmp_path)
        assert found == {name: data} if name == "x.csv" else {k: found.get(k) for k in files} == files
        assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part")]

    def test_it_may_break_off_several_times(self, web: Web, source: Sets, tmp_path: Path) -> None:
        data = os.urandom(100_000)
        source(web.has("x.csv", data))
        for end in (10, 40_000, 99_999):
            web.cut["x.csv"] = end
            refused("fetch", "cifar10", "--root", tmp_path)
        fetched("cifar10", tmp_path)
        assert below(tmp_path) == {"x.csv": data} and web.sent == len(data)

    def test_a_server_that_cannot_go_on_begins_anew(self, web: Web, source: Sets, tmp_path: Path) -> None:
        data = os.urandom(100_000)
        source(web.has("x.csv", data))
        web.ranges, web.cut["x.csv"] = False, 60_000
        refused("fetch", "cifar10", "--root", tmp_path)
        fetched("cifar10", tmp_path)
        assert below(tmp_path) == {"x.csv": data} and web.sent == 160_000

    def test_a_file_that_changed_meanwhile_is_not_mixed(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """Half of the old and half of the new is refused, and the next attempt begins anew."""
        old, new = os.urandom(50_000), os.urandom(50_000)
        source(web.has("x.csv", old))
        web.cut["x.csv"] = 20_000
        refused("fetch", "cifar10", "--root", tmp_path)
        source(web.has("x.csv", new))
        if asked("fetch", "cifar10", "--root", tmp_path).code:
            assert "x.csv" not in below(tmp_path)
            fetched("cifar10", tmp_path)
        assert below(tmp_path) == {"x.csv": new}

    def test_a_file_that_is_whole_but_was_not_placed(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """Ended between download and extraction: a part that is as long as the file."""
        data = os.urandom(50_000)
        source(web.has("x.csv", data + b"more"))
        web.cut["x.csv"] = len(data)
        refused("fetch", "cifar10", "--root", tmp_path)
        source(web.has("x.csv", data))
        if asked("fetch", "cifar10", "--root", tmp_path).code:
            fetched("cifar10", tmp_path)
        assert below(tmp_path) == {"x.csv": data}

    def test_files_of_one_name_are_not_mixed(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """MNIST's and Fashion-MNIST's are: one broke off, and the other is fetched into the same root."""
        one, two = os.urandom(50_000), os.urandom(60_000)
        source(web.has("one/x.gz", one), name="mnist", folder="one")
        source(web.has("two/x.gz", two), name="fashion_mnist", folder="two")
        web.cut["one/x.gz"] = 20_000
        refused("fetch", "mnist", "--root", tmp_path)
        fetched("fashion_mnist", tmp_path)
        fetched("mnist", tmp_path)
        assert below(tmp_path) == {"one/x.gz": one, "two/x.gz": two}

    def test_only_what_is_missing_is_downloaded(self, web: Web, source: Sets, tmp_path: Path) -> None:
        first, second = web.has("a.csv", b"a" * 1000), web.has("b.zip", packed(FILES))
        source(first, second)
        data = web.files.pop("b.zip")
        assert "b.zip" in refused("fetch", "cifar10", "--root", tmp_path)
        web.files["b.zip"] = data
        fetched("cifar10", tmp_path)
        assert [name for name, _ in web.requests] == ["a.csv", "b.zip", "b.zip"]

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip", "x.csv"])
    def test_a_wrong_checksum_is_refused_and_removed(self, name: str, web: Web, source: Sets, tmp_path: Path) -> None:
        data = ARCHIVES[name](FILES) if name in ARCHIVES else b"text"
        source(web.has(name, data, md5=hashlib.md5(b"other").hexdigest()))
        text = refused("fetch", "cifar10", "--root", tmp_path)
        assert name in text and ("md5" in text.lower() or "checksum" in text.lower())
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
        source(web.has(name, data))
        fetched("cifar10", tmp_path)
        assert web.requests[-1] == (name, ""), "from the beginning"

    def test_what_the_server_does_not_have(self, web: Web, source: Sets, tmp_path: Path) -> None:
        file = web.has("x.zip", b"")
        del web.files["x.zip"]
        source(file)
        text = refused("fetch", "cifar10", "--root", tmp_path / "root")
        assert "404" in text and file.url in text
        assert below(tmp_path) == {}

    def test_nobody_there(self, source: Sets, tmp_path: Path) -> None:
        url = f"http://127.0.0.1:{free_port()}/x.zip"
        source(File(url, "0" * 32))
        assert url in refused("fetch", "cifar10", "--root", tmp_path)

    def test_something_else_answers(self, source: Sets, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"SSH-2.0-OpenSSH\r\n")

            thread = threading.Thread(target=answer)
            thread.start()
            source(File(f"http://127.0.0.1:{listener.getsockname()[1]}/x.zip", "0" * 32))
            refused("fetch", "cifar10", "--root", tmp_path)
            thread.join()

    def test_root_that_cannot_be_written(self, web: Web, source: Sets, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        source(web.has("x.zip", packed(FILES)))
        assert "file" in refused("fetch", "cifar10", "--root", tmp_path / "file")

    def test_names_and_sets_that_are_fetched_by_hand(self, tmp_path: Path) -> None:
        text = refused("fetch", "pacs", "--root", tmp_path)
        assert "https://" in text and "PACS" in text
        said = asked("fetch", "cifar11", "--root", str(tmp_path))
        assert said.code == 2 and "cifar10" in said.err and "Traceback" not in said.err


class TestArchives:
    """None may write outside of root, or be half there."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        folder = tmp_path / "outside"
        folder.mkdir()
        (folder / "mine").write_text("mine")
        return folder

    def harmless(self, web: Web, source: Sets, outside: Path, name: str, data: bytes) -> None:
        root = outside.parent / "root"
        shutil.rmtree(root, ignore_errors=True)
        source(web.has(name, data))
        said = asked("fetch", "cifar10", "--root", root)
        assert said.code in (0, 2) and "Traceback" not in said.err
        if said.code:
            assert said.err.count("error: ") == 1
            assert below(root).keys() <= {name}, "all or nothing"
        assert below(outside) == {"mine": b"mine"}
        assert {path.name for path in outside.parent.iterdir()} <= {"outside", "root"}
        for path in root.rglob("*"):
            assert path.resolve().is_relative_to(root.resolve()), f"{path} leads outside"

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    @pytest.mark.parametrize(
        "evil", ["../evil", "../outside/mine", "d/../../outside/mine", "{}/mine", "..", "./../evil", "d/../../../evil"]
    )
    def test_names_that_lead_out(self, name: str, evil: str, web: Web, source: Sets, outside: Path) -> None:
        data = ARCHIVES[name]({"d/a.txt": b"a", evil.format(outside): b"evil", "d/z.txt": b"z"})
        self.harmless(web, source, outside, name, data)
        assert not (outside.parent.parent / "evil").exists()

    @pytest.mark.parametrize("target", ["../outside", "{}", "../../outside", "d/../../outside"])
    def test_links_that_lead_out(self, target: str, web: Web, source: Sets, outside: Path) -> None:
        target = target.format(outside)
        files = {"d/a.txt": b"a", "d/link/mine": b"evil", "link/mine": b"evil", "link/new": b"evil"}
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            data = tar(files, link("d/link", target, kind), link("link", target, kind))
            self.harmless(web, source, outside, "x.tar.gz", data)
        self.harmless(web, source, outside, "x.zip", packed(files, {"d/link": target, "link": target}))

    def test_a_link_to_a_file_outside(self, web: Web, source: Sets, outside: Path) -> None:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            for target in (str(outside / "mine"), "../outside/mine"):
                self.harmless(web, source, outside, "x.tar.gz", tar({"m": b"evil"}, link("m", target, kind)))

    def test_devices_and_pipes(self, web: Web, source: Sets, outside: Path) -> None:
        for kind in (tarfile.FIFOTYPE, tarfile.CHRTYPE):
            self.harmless(web, source, outside, "x.tar.gz", tar({"d/a": b"a"}, link("d/special", "", kind)))
            assert not (outside.parent / "root/d/special").exists()

    def test_a_link_that_lies_in_root_already(self, web: Web, source: Sets, outside: Path) -> None:
        """Data on another disk is linked by people; what an archive holds goes where they say, or nowhere."""
        root = outside.parent / "root"
        root.mkdir()
        source(web.has("x.tar.gz", tar(FILES)))
        (root / "mine.txt").symlink_to(outside / "mine")
        fetched("cifar10", root)
        assert below(outside) == {"mine": b"mine"}

    @pytest.mark.parametrize("name", ["x.tar.gz", "x.zip"])
    def test_a_damaged_archive_is_not_half_there(self, name: str, web: Web, source: Sets, tmp_path: Path) -> None:
        """Its checksum is right, but it ends, or is wrong, in the middle."""
        words = " ".join(map(str, np.random.default_rng(0).integers(0, 99, 20_000))).encode()
        whole = ARCHIVES[name]({"d/a.txt": b"a" * 100, "d/words": words, "d/z": b"z"})
        damaged = [whole[: len(whole) // 2], b"", b"no archive at all"]
        if name.endswith(".zip"):  # it has checksums of its own
            damaged += [whole[:k] + bytes([whole[k] ^ 0xFF]) + whole[k + 1 :] for k in range(500, 20_000, 3000)]
        for k, data in enumerate(damaged):
            source(web.has(name, data))
            text = refused("fetch", "cifar10", "--root", tmp_path / str(k))
            assert f"{name} cannot be extracted" in text
            assert below(tmp_path / str(k)).keys() <= {name}

    def test_what_cannot_all_be_placed_is_not_placed(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """A folder of this name is there, of the user or of another program."""
        (tmp_path / "e").mkdir()
        (tmp_path / "e/mine").write_text("mine")
        source(web.has("x.tar.gz", tar(FILES | {"e/b": b"b"})))
        assert str(tmp_path / "e") in refused("fetch", "cifar10", "--root", tmp_path)
        assert below(tmp_path) == {"e/mine": b"mine"}
        fetched("cifar10", tmp_path, "--again")
        assert below(tmp_path)["e/b"] == b"b"

    def test_readers_never_see_half_of_it(self, web: Web, source: Sets, tmp_path: Path) -> None:
        """A folder is there with all its files, or not at all."""
        files = {f"d/{k:04d}": b"x" * 50 for k in range(600)}
        source(web.has("x.tar.gz", tar(files)))
        seen: set[int] = set()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen.add(len(os.listdir(tmp_path / "d")) if (tmp_path / "d").exists() else 0)
                time.sleep(0.0002)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            fetched("cifar10", tmp_path)
        finally:
            done.set()
            thread.join()
        assert seen <= {0, 600} and len(below(tmp_path / "d")) == 600


class TestCheck:
    def test_it_counts_and_compares(self, source: Sets, tmp_path: Path) -> None:
        Cifar(10, False).write(tmp_path)
        source(File("http://127.0.0.1/x", ""), rows=(35, 7))
        said = asked("check", "cifar10", "--root", tmp_path)
        assert said.code == 0, said
        assert {"35", "7", "10"} <= set(said.out.replace(",", " ").replace(":", " ").split()), said.out

    def test_other_numbers_than_published_are_told(self, tmp_path: Path) -> None:
        Cifar(10, False).write(tmp_path)
        said = asked("check", "cifar10", "--root", tmp_path)
        text = (said.out + said.err).replace(",", "")
        assert said.code != 0 and "Traceback" not in text
        assert "35" in text and "50000" in text and "10000" in text, text

    def test_what_is_missing_or_damaged_is_one_line(self, tmp_path: Path) -> None:
        assert "python -m fl_dist.data fetch cifar10" in refused("check", "cifar10", "--root", tmp_path)
        Cifar(10, False).write(tmp_path)
        file = tmp_path / "cifar-10-batches-bin/data_batch_2.bin"
        file.write_bytes(file.read_bytes()[:-1])
        assert "data_batch_2.bin is damaged" in refused("check", "cifar10", "--root", tmp_path)

    def test_it_reads_the_files_not_what_was_made_of_them(self, tmp_path: Path) -> None:
        for domain in ("art", "photo"):
            (tmp_path / "PACS" / domain / "dog").mkdir(parents=True)
            Image.new("RGB", (20, 20)).save(tmp_path / "PACS" / domain / "dog" / "1.jpg")
        assert "published were 9,991 images in all domains, here are 2" in refused("check", "pacs", "--root", tmp_path)
        image = tmp_path / "PACS" / "photo" / "dog" / "1.jpg"
        image.write_bytes(image.read_bytes()[:100])
        assert "photo/dog/1.jpg cannot be read" in refused("check", "pacs", "--root", tmp_path)


class TestThereAlready:
    def test_what_was_copied_is_not_fetched(self, tmp_path: Path) -> None:
        for name in ("cifar-10-batches-bin", "MNIST/raw"):
            (tmp_path / name).mkdir(parents=True)
        for part in ("train", "t10k"):
            for kind in ("images-idx3", "labels-idx1"):
                (tmp_path / "MNIST" / "raw" / f"{part}-{kind}-ubyte").touch()
        assert "there already" in fetched("cifar10", tmp_path).out
        assert fetched("mnist", tmp_path).out.count("there already") == 4


class TestShow:
    def test_it_prints_sizes_and_draws_classes(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text(
            "partition: {name: shards, per_client: 2}\nclients: {total: 8, per_round: 2}\n"
        )
        said = asked("show", tmp_path / "c.yaml", "-o", tmp_path / "x.png")
        assert said.code == 0, said
        rows = len(np.load(Path(shared.__file__).parent / "digits.npz")["y_train"])
        words = said.out.replace(",", "").split()
        assert "8" in words and str(rows) in words, said.out
        pixels = np.asarray(Image.open(tmp_path / "x.png").convert("RGB")).reshape(-1, 3)
        assert len(pixels) > 50_000 and len(np.unique(pixels, axis=0)) > 20

    def test_overrides_count(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("clients: {total: 8, per_round: 2}\n")
        few, more = (asked("show", tmp_path / "c.yaml", "partition=iid", f"clients.total={n}") for n in (8, 13))
        assert few.code == more.code == 0 and "13" in more.out and few.out != more.out

    def test_mistakes_are_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_text("clients: {total: 8, per_round: 2}\n")
        assert "x.doc" in refused("show", tmp_path / "c.yaml", "-o", tmp_path / "x.doc")
        assert "did you mean 'total'" in refused("show", tmp_path / "c.yaml", "clients.totl=3")
        assert "none.yaml" in refused("show", tmp_path / "none.yaml")


class TestCache:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("FL_DIST_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_it_lists_and_clears(self, cache: Path, tmp_path: Path) -> None:
        assert asked("cache").code == 0, "nothing is there yet"
        file = tmp_path / "file"
        file.write_text("x")

        def make(new: shared.Allocate) -> None:
            new("x", (1000, 100), np.int64)[:] = 1

        shared.arrays("numbers", [file], None, make)
        said = asked("cache")
        assert said.code == 0 and "numbers-" in said.out and str(cache) in said.out and "kB" in said.out
        (cache / "mine.txt").write_text("mine")
        assert asked("cache", "--clear").code == 0
        assert "numbers-" not in asked("cache").out and shared.held() == []
        assert (cache / "mine.txt").read_text() == "mine" and file.exists(), "only what is the program's is removed"
        assert asked("cache", "--clear").code == 0
