"""An HTTP relay before a server that answers in its place, loses requests and replies, and damages bodies, on order."""

import contextlib
import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from attrs import define, field, frozen


@frozen(kw_only=True)
class Request:
    """What a client asks: `index` counts from 1 since the rule was set."""

    index: int
    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def creates(self) -> bool:
        """Whether this is an exclusive create, in the words of any of the three providers."""
        return self.headers.get("if-none-match") == "*" or "ifGenerationMatch=0" in self.path


@frozen
class Answer:
    """A reply in the server's place; the request does not reach it."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(factory=dict)


DROP = "drop"
"""The connection is closed and the request does not reach the server."""
LOSE = "lose"
"""The server does it, and the connection is closed instead of a reply."""
CUT = "cut"
"""The reply breaks off in the middle of its body."""
DAMAGE = "damage"
"""One bit of the request's body is turned on the way to the server."""
MUTE = "mute"
"""The request is read and never answered; the connection stays open."""
DEAF = "deaf"
"""The request's body is not even read; the connection stays open."""

Rule = Callable[[Request], Answer | str | None]


@define
class Relay:
    """`url` leads to the server by way of `rule`, which answers what to do with a request; None is to pass it on."""

    url: str
    rule: Rule = lambda request: None
    seen: list[Request] = field(factory=list)
    closed: threading.Event = field(factory=threading.Event)
    _lock: threading.Lock = field(factory=threading.Lock)

    def order(self, rule: Rule) -> None:
        with self._lock:
            self.seen.clear()
            self.rule = rule

    def decide(self, method: str, path: str, headers: Mapping[str, str]) -> Answer | str | None:
        with self._lock:
            lower = {k.lower(): v for k, v in headers.items()}
            request = Request(index=len(self.seen) + 1, method=method, path=path, headers=lower)
            self.seen.append(request)
        return self.rule(request)  # which may itself ask by way of this relay


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    relay: Relay
    upstream: str

    def _serve(self) -> None:
        order = self.relay.decide(self.command, self.path, dict(self.headers.items()))
        body = b"" if order == DEAF else self._body()
        if order in (DEAF, MUTE):
            self.relay.closed.wait(60)
            self._hang_up()
            return
        if order == DROP:
            self._hang_up()
            return
        if isinstance(order, Answer):
            self._reply(order.status, dict(order.headers), order.body)
            return
        if order == DAMAGE and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        status, headers, data = self._forward(body)
        if order == LOSE:
            self._hang_up()
        elif order == CUT:
            self._reply(status, headers, data, send=len(data) // 2)
            self._hang_up()
        else:
            self._reply(status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = _serve

    def handle_expect_100(self) -> bool:
        """Whether a client that waits for it may send its body is seen when that is read."""
        return True

    def _body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """The host's name stays the one that the client signed."""
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        with contextlib.closing(connection):
            hop = ("connection", "transfer-encoding", "content-length", "expect")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in hop}
            connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = connection.getresponse()
            data = answer.read()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in hop}
            if self.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length", "0")
            return answer.status, headers, data

    def _reply(self, status: int, headers: dict[str, str], data: bytes, send: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:send])
        self.wfile.flush()

    def _hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *arguments: Any) -> None:
        """A client that went away is what these tests are about."""


@contextlib.contextmanager
def relayed(url: str) -> Iterator[Relay]:
    """A relay before the server at `url`."""
    handler = type("Handler", (_Handler,), {"upstream": urlsplit(url).netloc})
    server = _Server(("127.0.0.1", 0), handler)
    relay = Relay(f"http://127.0.0.1:{server.server_port}")
    handler.relay = relay  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield relay
    finally:
        relay.closed.set()
        server.shutdown()
        server.server_close()
        thread.join()
