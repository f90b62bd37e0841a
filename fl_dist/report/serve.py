"""The page on this machine's own address, following the runs."""

import hashlib
import json
import signal
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fl_dist.common.words import message
from fl_dist.report.gather import Mark, Source
from fl_dist.report.lines import Known
from fl_dist.report.page import Document, document, encoded, page

ADDRESS = "127.0.0.1"
NAMES = (ADDRESS, "localhost", "[::1]")
"""Hosts that a browser may ask for; another name that leads here belongs to a page of someone else."""
REMEMBERED = 8
"""Versions of which is known what has changed since."""


class Watch:
    """The runs as they are now; they are read again only when their files have changed."""

    def __init__(self, source: Source) -> None:
        self._source, self._known, self._lock = source, Known(), threading.Lock()
        self._mark: Mark | None = None
        self._data: Document = {}
        self._versions: dict[str, dict[str, str]] = {}
        """By version: what every figure was, as a hash."""

    def now(self) -> tuple[str, Document]:
        """The version and all of its data."""
        with self._lock:
            mark = self._source.mark()
            if mark != self._mark:
                self._data = document(self._source, self._known)
                self._mark = mark
                self._remember()
            return next(reversed(self._versions)), self._data

    def _remember(self) -> None:
        hashes = {name: _hash(figure) for name, figure in self._data["figures"].items()}
        rest = {key: value for key, value in self._data.items() if key not in ("figures", "made")}
        version = f'"{_hash([hashes, rest])}"'
        self._versions.pop(version, None)
        self._versions[version] = hashes
        while len(self._versions) > REMEMBERED:
            del self._versions[next(iter(self._versions))]

    def since(self, version: str | None) -> tuple[str, Document | None]:
        """The version, and what is new in it for someone who has another; None: nothing."""
        now, data = self.now()
        if version == now:
            return now, None
        had, has = self._versions.get(version or "", {}), self._versions[now]
        new = {name: figure for name, figure in data["figures"].items() if had.get(name) != has[name]}
        return now, data | {"figures": new, "names": [*data["figures"]]}


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()[:24]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watch: Watch, port: int = 0) -> None:
        self.watch = watch
        super().__init__((ADDRESS, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has left is no error."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        answers: dict[str, Callable[[], None]] = {"/": self._page, "/data": self._data}
        if self._host() not in NAMES:
            self._answer(HTTPStatus.FORBIDDEN, "this address is for this machine only")
        elif (answer := answers.get(self.path.partition("?")[0])) is None:
            self._answer(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            try:
                answer()
            except Exception as e:  # whatever the folders hold, the next look may find them whole
                self._answer(HTTPStatus.SERVICE_UNAVAILABLE, message(e))

    def _host(self) -> str:
        """Without its port, which differs where it is forwarded."""
        host = self.headers.get("Host", "")
        return host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host

    def _page(self) -> None:
        version, data = self.server.watch.now()
        self._answer(HTTPStatus.OK, page(data | {"mark": version}, live=True), "text/html")

    def _data(self) -> None:
        version, data = self.server.watch.since(self.headers.get("If-None-Match"))
        if data is None:
            self._answer(HTTPStatus.NOT_MODIFIED, "", mark=version)
        else:
            self._answer(HTTPStatus.OK, encoded(data), "application/json", version)

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain", mark: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("ETag", mark)):
            if value is not None:
                self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """The terminal belongs to the user."""


def serve(watch: Watch, port: int) -> None:
    """Until Ctrl-C, or until the process is asked to end."""
    watch.now()
    with Server(watch, port) as server:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: ended.set())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"the report is at {server.address} until Ctrl-C", flush=True)
        while not ended.wait(3600):
            pass
        server.shutdown()
        print("ended", flush=True)
