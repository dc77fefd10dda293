"""A real S3 server in a process of its own, and a proxy before it that answers badly when it is told to."""

import contextlib
import functools
import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from botocore.session import Session

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """The port of a moto server on loopback, until the block ends."""
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    reading = threading.Thread()
    try:
        said = iter(process.stderr.readline, "")
        port = next(int(found[1]) for line in said if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        # A line is logged for every request: the pipe must not fill up.
        reading = threading.Thread(target=process.stderr.read, daemon=True)
        reading.start()
        yield port
    finally:
        process.kill()
        process.wait()
        if reading.ident is not None:
            reading.join()
        process.stderr.close()


@functools.cache
def client(port: int) -> Any:
    """botocore's own S3 client: what the tests look at the server with."""
    return Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="test", aws_secret_access_key="test",
    )  # fmt: skip


class Request(NamedTuple):
    """`query` with what stands after the question mark."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes


Fault = Callable[["Handler", Request], bool]
"""Does what it does to one request; True where that was all, False where the request goes on as if nothing was."""


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to a server, and lets `faults` loose on the requests that it is asked to; it keeps what it saw."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.seen: list[str] = []
        self.faults: list[tuple[re.Pattern[str], Fault]] = []
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def on(self, pattern: str, *faults: Fault) -> None:
        """The next requests "METHOD /path?query" that match get these, one each, in this order."""
        self.faults += [(re.compile(pattern), fault) for fault in faults]

    def fault_for(self, line: str) -> Fault | None:
        with self.lock:
            self.seen.append(line)
            for at, (pattern, fault) in enumerate(self.faults):
                if pattern.search(line):
                    del self.faults[at]
                    return fault
        return None

    def handle_error(self, request: object, address: object) -> None:
        """A client that went away is what these tests are about."""


@contextlib.contextmanager
def faulty_proxy(target: int) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(target)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def _handle(self) -> None:
        path, _, query = self.path.partition("?")
        request = Request(self.command, path, query, dict(self.headers.items()), self._body())
        fault = self.server.fault_for(f"{self.command} {self.path}")
        if fault is None or not fault(self, request):
            self.answer(self.forward(request))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def forward(self, request: Request) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target)
        kept = {k: v for k, v in request.headers.items() if k.lower() not in ("expect", "transfer-encoding")}
        kept["Content-Length"] = str(len(request.body))
        connection.request(request.method, self.path, request.body, kept)
        came = connection.getresponse()
        answer = Answer(came.status, came.getheaders(), came.read())
        connection.close()
        return answer

    def answer(self, answer: Answer, *, said_bytes: int | None = None) -> None:
        """`said_bytes`: the length that is announced, whatever is sent."""
        self.send_response_only(answer.status)
        length = next((v for k, v in answer.headers if k.lower() == "content-length"), "0")
        for name, value in answer.headers:
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                self.send_header(name, value)
        if self.command != "HEAD":
            length = str(len(answer.body) if said_bytes is None else said_bytes)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


def status(number: int, code: str) -> Fault:
    """The server says this, and does nothing."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told to</Message></Error>".encode()

    def fault(handler: Handler, request: Request) -> bool:
        handler.answer(Answer(number, [("Content-Type", "application/xml")], body))
        return True

    return fault


def unanswered(handler: Handler, request: Request) -> bool:
    """The server does it, and its answer is lost."""
    handler.forward(request)
    handler.hang_up()
    return True


def unheard(handler: Handler, request: Request) -> bool:
    """The connection breaks before the server has heard all."""
    handler.hang_up()
    return True


def cut_short(handler: Handler, request: Request) -> bool:
    """Half of the answer comes, then the connection breaks."""
    answer = handler.forward(request)
    handler.answer(answer._replace(body=answer.body[: len(answer.body) // 2]), said_bytes=len(answer.body))
    handler.hang_up()
    return True


def truncated(handler: Handler, request: Request) -> bool:
    """Half of the answer comes, as if that were all."""
    answer = handler.forward(request)
    handler.answer(answer._replace(body=answer.body[: len(answer.body) // 2]))
    return True


def without_conditions(handler: Handler, request: Request) -> bool:
    """A server that does not know If-None-Match."""
    kept = {k: v for k, v in request.headers.items() if k.lower() != "if-none-match"}
    handler.answer(handler.forward(request._replace(headers=kept)))
    return True


def held_until(event: threading.Event) -> Fault:
    """Nothing comes until the event, whoever still waits."""

    def fault(handler: Handler, request: Request) -> bool:
        event.wait()
        handler.hang_up()
        return True

    return fault


PASSING: dict[str, Fault] = {
    "500": status(500, "InternalError"),
    "503": status(503, "SlowDown"),
    "429": status(429, "TooManyRequests"),
    "not heard": unheard,
    "answer lost": unanswered,
}
"""What passes by itself."""
