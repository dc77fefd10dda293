"""An object store for a scratch run: S3 over HTTP on loopback, bad when it is told to. It looks at no signature."""

import importlib.util
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import parse_qsl, unquote

from shardwise.verify.chaos_objects import BUCKET, Answer, Objects, Request, error

# Where a scratch run keeps its checkpoints; the objects are files below its folder, as a run's own are.
URL = f"s3://{BUCKET}/checkpoints"
# What a store under faults does with a request: answers with an error; breaks the connection before it has heard all;
# does it and loses the answer, or half of what it read; or says nothing for longer than who asks waits.
Way = Literal["500 InternalError", "503 SlowDown", "torn", "lost", "short", "silent"]
WAYS: tuple[Way, ...] = get_args(Way)
# So long a scratch run waits for an answer (others 60 s), so that a store that says nothing is met in its short life.
PATIENCE_SECONDS = 2.0
SILENT_SECONDS = 2 * PATIENCE_SECONDS


def why_not() -> str:
    """What keeps a run here from speaking to it; empty where nothing does."""
    return "" if importlib.util.find_spec("s3fs") is not None else "there is no s3fs, which speaks to such a store"


class BadStore(ThreadingHTTPServer):
    """Serves the objects for as long as the block lasts; harms requests in the seconds after `harm`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects = Objects(root)
        self.harmed, self.silent_seconds = 0, SILENT_SECONDS
        self._until, self._draws = 0.0, random.Random(0)
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="shardwise-store", daemon=True)

    def __enter__(self) -> "BadStore":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.shutdown()
        self._thread.join()
        self.server_close()

    def harm(self, seconds: float, draw: float) -> None:
        self._until, self._draws = time.monotonic() + seconds, random.Random(draw)

    def way(self) -> Way | None:
        """What befalls the next request; one of four goes through meanwhile."""
        if time.monotonic() >= self._until or self._draws.random() < 0.25:
            return None
        self.harmed += 1
        return self._draws.choice(WAYS)

    def environment(self) -> dict[str, str]:
        """What a command needs to find it, and nothing else by the way."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_address[1]}", "AWS_ACCESS_KEY_ID": "scratch",
            "AWS_SECRET_ACCESS_KEY": "scratch", "AWS_SESSION_TOKEN": "", "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1", "SHARDWISE_FAULT_STORE_SECONDS": str(PATIENCE_SECONDS),
        }  # fmt: skip

    def handle_error(self, request: object, address: object) -> None:
        """Who asked was killed: that is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BadStore

    def _handle(self) -> None:
        way = self.server.way()
        if way == "torn":
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if way == "silent":
            self.server.closing.wait(self.server.silent_seconds)
            self.close_connection = True
        elif way in ("500 InternalError", "503 SlowDown"):
            number, _, code = way.partition(" ")
            self._say(error(int(number), code))
        else:
            answer = self.server.objects.answer(self._request(body))
            self.close_connection = way is not None
            if way is None or (way == "short" and answer.body):
                self._say(answer, len(answer.body) // 2 if way == "short" else len(answer.body))

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _request(self, body: bytes) -> Request:
        path, _, query = self.path.partition("?")
        key = unquote(path).strip("/").removeprefix(BUCKET).lstrip("/")
        headers = {name.lower(): value for name, value in self.headers.items()}
        return Request(self.command, key, dict(parse_qsl(query, keep_blank_values=True)), headers, body)

    def _say(self, answer: Answer, sent: int | None = None) -> None:
        """`sent`: of the body that is announced, so many bytes."""
        self.send_response_only(answer.status)
        for name, value in (*answer.headers, ("Content-Length", str(len(answer.body)))):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:sent])

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""
