"""The report of a run that goes on, served to browsers of this machine: one page, made again and again.

Read-only, on 127.0.0.1 at a port that is free, under a path that nobody can guess: other users of the machine could
open the port, and other pages in the browser could ask for it. So whoever does not know the path, or comes under
another name for this machine (DNS rebinding), gets 403; and the page may load nothing and ask for nothing but itself.
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
ALIVE_S = 5.0  # how long at most nothing is sent: a browser that has gone is noticed by it
BEFORE = '<!doctype html><meta http-equiv="refresh" content="1"><title>spawnsim</title><p>The ranks begin.\n'
LEFT_S = 5.0  # how long browsers may take to read the last page


class LivePage:
    """A page that is served at `url`, which has the token, until it is closed."""

    def __init__(self, title: str) -> None:
        self._title, self._nonce = title, secrets.token_urlsafe(16)
        self._changed = threading.Condition()
        self._pages = 0  # so many have been made
        self._page, self._closed = BEFORE, False
        self._server = _Server(self)
        self.url = f"http://{HOST}:{self._server.server_port}/{self._server.token}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="spawnsim-live", kwargs={"poll_interval": 0.1}
        )
        self._thread.start()

    def show(self, run: Recorded, states: RankStates | None) -> None:
        """Let browsers see how far the run is."""
        page = render([run], self._title, Live(states, self._nonce))
        with self._changed:
            self._page, self._pages = page, self._pages + 1
            self._changed.notify_all()

    def end(self, run: Recorded) -> None:
        self.show(run, None)
        self.close()

    def close(self) -> None:
        """Serve no more, once browsers have the page as it is now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.wait_for_readers(LEFT_S)
        self._server.server_close()

    @property
    def policy(self) -> str:
        """The Content-Security-Policy: our own style and script by their nonce, our own stream, and nothing else."""
        own = f"'nonce-{self._nonce}'"
        return (
            f"default-src 'none'; style-src {own}; script-src {own}; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def now(self) -> str:
        with self._changed:
            return self._page

    def pages(self) -> Iterator[tuple[str, str]]:
        """Yield each new page with its kind: "page", the last one "end"; "" now and then where nothing is new."""
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
    """Serves one page. Its threads end with the process, but the last page is waited for: `wait_for_readers`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage) -> None:
        super().__init__((HOST, 0), _Handler)
        self.page, self.token = page, secrets.token_urlsafe(24)
        self.names = (f"{HOST}:{self.server_port}", f"localhost:{self.server_port}")
        self._readers, self._gone = 0, threading.Condition()

    def reading(self, more: int) -> None:
        """Count a browser that comes (1) or leaves (-1)."""
        with self._gone:
            self._readers += more
            self._gone.notify_all()

    def wait_for_readers(self, limit_s: float) -> None:
        with self._gone:
            self._gone.wait_for(lambda: not self._readers, limit_s)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a browser that has closed its connection is no error of the run."""


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page and its stream of pages."""

    server: _Server
    server_version, sys_version = "spawnsim", ""
    timeout = 30.0  # for a request to come: one that never ends holds no thread

    def do_GET(self) -> None:
        path = self.path.encode("utf-8", "replace")
        known = [f"/{self.server.token}/{name}".encode() for name in ("", "events")]
        # Compared in a time that tells nothing of how much was right.
        found = [secrets.compare_digest(path, each) for each in known]
        if not any(found) or self.headers.get("Host") not in self.server.names:
            self._head(HTTPStatus.FORBIDDEN, "text/plain")
            self._write("403: open the address that was printed\n")
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

    def log_message(self, *_said: Any) -> None:
        """Say nothing: standard error is the run's, and a log would hold the token."""
