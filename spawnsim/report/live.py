"""The report of a run in progress, served to browsers on this machine: one page that is rendered repeatedly.

Read-only, on 127.0.0.1 at a free port, under an unguessable path: other users of the machine could open the port, and
other pages in the browser could request it. A request without the path, or with another host name for this machine
(DNS rebinding), therefore gets 403; and the page may load and request nothing but itself.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spawnsim.plots.experiments import Recorded
from spawnsim.record.journal import RankStates
from spawnsim.report.page import Live, render

HOST = "127.0.0.1"
ALIVE_S = 5.0  # the longest time without a write: a write reveals a browser that has gone
BEFORE = '<!doctype html><meta http-equiv="refresh" content="1"><title>spawnsim</title><p>The ranks are starting.\n'
LEFT_S = 5.0  # how long browsers may take to read the last page


class LivePage:
    """A page that is served at `url`, which contains the token, until it is closed."""

    def __init__(self, title: str) -> None:
        self._title, self._nonce = title, secrets.token_urlsafe(16)
        self._changed = threading.Condition()
        self._pages = 0  # number of rendered pages
        self._page, self._closed = BEFORE, False
        self._server = _Server(self)
        self.url = f"http://{HOST}:{self._server.server_port}/{self._server.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="spawnsim-live", kwargs={"poll_interval": 0.1}
        )
        self._thread.start()

    def show(self, run: Recorded, states: RankStates | None) -> None:
        """Show browsers the progress of the run."""
        page = render([run], self._title, Live(states, self._nonce))
        with self._changed:
            self._page, self._pages = page, self._pages + 1
            self._changed.notify_all()

    def end(self, run: Recorded) -> None:
        self.show(run, None)
        self.close()

    def close(self) -> None:
        """Stop serving, once browsers have the current page."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.wait_for_readers(LEFT_S)
        self._server.server_close()

    @property
    def policy(self) -> str:
        """The Content-Security-Policy: the page's own style and script by nonce, its own stream, and nothing else."""
        own = f"'nonce-{self._nonce}'"
        return (
            f"default-src 'none'; style-src {own}; script-src {own}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def now(self) -> str:
        with self._changed:
            return self._page

    def pages(self) -> Iterator[tuple[str, str]]:
        """Yield each new page with its kind: "page", and "end" for the last; every few seconds "" if nothing is new."""
        seen = 0
        while True:
            with self._changed:
                if self._pages == seen and not self._closed:
                    self._changed.wait(ALIVE_S)
                new, page, closed = self._pages > seen, self._page, self._closed
                seen = self._pages
            yield ("end" if closed else "page" if new else ""), page
            if closed:
                return


class _Server(ThreadingHTTPServer):
    """Serves one page. Its threads end with the process, but `wait_for_readers` waits until the last page is read."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage) -> None:
        super().__init__((HOST, 0), _Handler)
        self.page, self.token = page, secrets.token_urlsafe(24)
        self.names = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")
        self._readers, self._gone = 0, threading.Condition()

    def reading(self, more: int) -> None:
        """Count a browser that connects (1) or leaves (-1)."""
        with self._gone:
            self._readers += more
            self._gone.notify_all()

    def wait_for_readers(self, limit_s: float) -> None:
        with self._gone:
            self._gone.wait_for(lambda: not self._readers, limit_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a browser that has closed its connection is not an error of the run."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and its stream of pages."""

    server: _Server
    server_version, sys_version = "spawnsim", ""
    timeout = 30.0  # seconds for a request: an incomplete one must not hold a thread for ever

    def do_GET(self) -> None:
        path = self.path.encode("utf-8", "replace")
        known = [f"/{self.server.token}/{name}".encode() for name in ("", "events")]
        # Compared in constant time: the duration reveals nothing about the correct part.
        found = [secrets.compare_digest(path, each) for each in known]
        if not any(found) or self.headers.get("Host") not in self.server.names:
            self._head(HTTPStatus.FORBIDDEN, "text/plain")
            self._write("403: open the address that spawnsim printed\n")
        elif self.command == "HEAD":
            self._head(HTTPStatus.OK, "text/event-stream" if found[1] else "text/html")
        elif found[0]:
            page = self.server.page.now()
            self._head(HTTPStatus.OK, "text/html")
            self._write(page)
        else:
            self._stream()

    def do_HEAD(self) -> None:
        self.do_GET()

    def _stream(self) -> None:
        self._head(HTTPStatus.OK, "text/event-stream")
        self.server.reading(1)
        try:
            for kind, page in self.server.page.pages():
                lines = "".join(f"data: {line}\n" for line in page.splitlines())
                self._write(f"event: {kind}\n{lines}\n" if kind else ": nothing new\n\n")
        finally:
            self.server.reading(-1)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8", "Content-Security-Policy": self.server.page.policy,
            "Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin", "Connection": "close",
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()

    def _write(self, text: str) -> None:
        if self.command != "HEAD":
            self.wfile.write(text.encode())
            self.wfile.flush()

    def log_message(self, *_message: Any) -> None:
        """Log nothing: standard error belongs to the run, and a log would contain the token."""
