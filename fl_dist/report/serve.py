"""The page on this machine's own address, following the runs."""

import hashlib
import json
import signal
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fl_dist.common.errors import UserError, error_message
from fl_dist.report.page import Document, build_document, render_page, to_script_json
from fl_dist.report.run_reader import Fingerprint
from fl_dist.report.run_source import RunSource
from fl_dist.report.series import SeriesCache

ADDRESS = "127.0.0.1"
ALLOWED_HOSTS = (ADDRESS, "localhost", "[::1]")
"""Any other name that leads here belongs to a page of someone else."""
MAX_PORT = 65535
MAX_VERSIONS = 8
"""Versions whose figures are remembered, to send only what changed."""


class LiveDocument:
    """The document as it is now; it is built again only when files of the runs have changed."""

    def __init__(self, source: RunSource) -> None:
        self._source, self._cache, self._lock = source, SeriesCache(), threading.Lock()
        self._fingerprint: Fingerprint | None = None
        self._document: Document = {}
        self._versions: dict[str, dict[str, str]] = {}
        """Hashes of all figures, by version."""

    def current(self) -> tuple[str, Document]:
        """The version and the whole document."""
        with self._lock:
            fingerprint = self._source.fingerprint()
            if fingerprint != self._fingerprint:
                self._document = build_document(self._source, self._cache)
                self._fingerprint = fingerprint
                self._add_version()
            return next(reversed(self._versions)), self._document

    def _add_version(self) -> None:
        hashes = {name: _hash(figure) for name, figure in self._document["figures"].items()}
        rest = {key: value for key, value in self._document.items() if key not in ("figures", "time")}
        version = f'"{_hash([hashes, rest])}"'
        self._versions.pop(version, None)
        self._versions[version] = hashes
        while len(self._versions) > MAX_VERSIONS:
            del self._versions[next(iter(self._versions))]

    def changes_since(self, version: str | None) -> tuple[str, Document | None]:
        """The current version, and the document with only the figures that are new to a reader; None: no change."""
        current, document = self.current()
        if version == current:
            return current, None
        old, new = self._versions.get(version or "", {}), self._versions[current]
        figures = {name: figure for name, figure in document["figures"].items() if old.get(name) != new[name]}
        return current, document | {"figures": figures, "figureNames": [*document["figures"]]}


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()[:24]


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, live: LiveDocument, port: int = 0) -> None:
        self.live = live
        if port > MAX_PORT:
            raise UserError(f"port {port} does not exist: the last one is {MAX_PORT}")
        super().__init__((ADDRESS, port), Handler)

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has left is not an error."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 60

    def do_GET(self) -> None:
        routes: dict[str, Callable[[], None]] = {"/": self._send_page, "/data": self._send_data}
        if self._host() not in ALLOWED_HOSTS:
            self._send(HTTPStatus.FORBIDDEN, "this address is for this machine only")
        elif (route := routes.get(self.path.partition("?")[0])) is None:
            self._send(HTTPStatus.NOT_FOUND, "there is nothing here")
        else:
            try:
                route()
            except Exception as e:  # whatever the folders hold now, the next request may find them complete
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, error_message(e))

    def _host(self) -> str:
        """Without the port, which differs where it is forwarded."""
        host = self.headers.get("Host", "")
        return host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host

    def _send_page(self) -> None:
        version, document = self.server.live.current()
        self._send(HTTPStatus.OK, render_page(document | {"etag": version}, live=True), "text/html")

    def _send_data(self) -> None:
        version, changes = self.server.live.changes_since(self.headers.get("If-None-Match"))
        if changes is None:
            self._send(HTTPStatus.NOT_MODIFIED, "", version=version)
        else:
            self._send(HTTPStatus.OK, to_script_json(changes), "application/json", version)

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain", version: str | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), ("ETag", version)):
            if value is not None:
                self.send_header(name, value)
        if status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not shown in the terminal."""


def serve(live: LiveDocument, port: int) -> None:
    """Until Ctrl-C or SIGTERM."""
    live.current()
    with Server(live, port) as server:
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: stop.set())
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"the report is at {server.address} until Ctrl-C", flush=True)
        while not stop.wait(3600):
            pass
        server.shutdown()
        print("ended", flush=True)
