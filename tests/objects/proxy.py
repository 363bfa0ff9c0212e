"""A way to the S3 server that fails on purpose: what it is told to inject happens to the next requests that fit.

unavailable   503, and the server never hears of the request
conflict      409, as S3 answers while another put of the name is under way; the server never hears of it
denied        403, likewise
unknown       501, likewise: the server is one that does not know the condition
late          the request is passed on after a while
lost          the server carries it out; its answer never arrives, and the connection is cut
silent        the same, and the connection stays open
cut           half of the body of the answer arrives
slow          the bodies of request and answer flow steadily, `PACE` bytes in a second
timeout       400, as S3 answers when the body of a request does not arrive; the server never hears of it
overwrites    the server is one that ignores If-None-Match: what was there is gone before the request arrives
"""

from __future__ import annotations

import http.client
import io
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gateway import HOST, Gateway

LATE_S = 1.0
PACE = 2 << 20
PIECE = 64 << 10


@dataclass
class _Rule:
    kind: str
    method: str
    part: str
    times: int


class Proxy:
    """Passes everything on to `gateway`, but for what is injected. `happened` counts the faults by kind."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.happened: Counter[str] = Counter()
        self._rules: list[_Rule] = []
        self._lock = threading.Lock()
        self.over = threading.Event()
        self._server = ThreadingHTTPServer((HOST, 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._server.server_address[1]}"

    def options(self) -> dict[str, str]:
        return self.gateway.options(self.address)

    def inject(self, kind: str, method: str, part: str, times: int = 1) -> None:
        """Let it happen to the next `times` requests of `method` with `part` in their path."""
        with self._lock:
            self._rules.append(_Rule(kind, method, part, times))

    def fault(self, method: str, path: str) -> str | None:
        """What happens to a request."""
        with self._lock:
            for rule in self._rules:
                if rule.times and rule.method == method and rule.part in path:
                    rule.times -= 1
                    self.happened[rule.kind] += 1
                    return rule.kind
        return None


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            fault = proxy.fault(self.command, self.path)
            length = int(self.headers.get("Content-Length", 0))
            body = b"".join(self.paced(self.rfile.read, length)) if fault == "slow" else self.rfile.read(length)
            if fault in _REFUSALS:
                status, code = _REFUSALS[fault]
                self.answer(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
                return
            if fault == "late":
                proxy.over.wait(LATE_S)
            if fault == "overwrites":
                (proxy.gateway.directory / self.path.lstrip("/")).unlink(missing_ok=True)
            server = http.client.HTTPConnection(proxy.gateway.address)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
            server.close()
            if fault == "silent":
                proxy.over.wait()
            if fault in ("lost", "silent"):
                self.cut()
                return
            headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN}
            headers["Content-Length"] = answer.getheader("Content-Length", str(len(content)))
            if fault == "slow":
                self.drip(answer.status, headers, content)
                return
            self.answer(answer.status, headers, content[: len(content) // 2] if fault == "cut" else content)
            if fault == "cut":
                self.cut()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def drip(self, status: int, headers: dict[str, str], body: bytes) -> None:
            rest = io.BytesIO(body)
            try:
                self.answer(status, headers, b"")
                for piece in self.paced(rest.read, len(body)):
                    self.wfile.write(piece)
            except OSError:  # the client has given up
                self.close_connection = True

        def paced(self, read: Callable[[int], bytes], length: int) -> Iterator[bytes]:
            for at in range(0, length, PIECE):
                yield read(min(PIECE, length - at))
                proxy.over.wait(PIECE / PACE)

        def cut(self) -> None:
            self.close_connection = True
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    return Handler


_REFUSALS = {
    "unavailable": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "denied": (403, "AccessDenied"),
    "timeout": (400, "RequestTimeout"),
    "unknown": (501, "NotImplemented"),
}
_OWN = ("connection", "content-length", "transfer-encoding", "keep-alive")
