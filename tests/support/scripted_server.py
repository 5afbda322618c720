"""A real HTTP server on the loopback interface that answers as a test says."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ReceivedRequest:
    """A request."""

    path: str
    headers: dict[str, str]
    content: Any
    at: float


@dataclass
class Reply:
    """Reply to a request: `content` as JSON, or unchanged if it is text. With no status the connection is closed."""

    content: Any = None
    status: int | None = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with five, a machine that is at work resets connections


class ScriptedServer:
    """Asks `answer` for the reply to each request, in a thread of its own; any other value is its content."""

    def __init__(self, answer: Callable[[ReceivedRequest], Any]) -> None:
        self.requests: list[ReceivedRequest] = []
        self.most_at_once = 0
        self._in_flight = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received = ReceivedRequest(self.path, dict(self.headers.items()), body, time.monotonic())
                with server._counted(received):
                    reply = answer(received)
                    reply = reply if isinstance(reply, Reply) else Reply(reply)
                    time.sleep(reply.after_s)
                if reply.status is None:
                    self.close_connection = True
                    return
                content = reply.content if isinstance(reply.content, str) else json.dumps(reply.content)
                with contextlib.suppress(ConnectionError):  # whoever asked waits no longer
                    self.send_response(reply.status)
                    for name, value in {**reply.headers, "Content-Length": str(len(content.encode()))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def _counted(self, received: ReceivedRequest) -> Iterator[None]:
        with self._lock:
            self.requests.append(received)
            self._in_flight += 1
            self.most_at_once = max(self.most_at_once, self._in_flight)
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


@contextmanager
def serving(answer: Callable[[ReceivedRequest], Any]) -> Iterator[ScriptedServer]:
    """A server that runs until the block ends."""
    with ScriptedServer(answer).running() as server:
        yield server


def completion(text: str | None, *, tokens: tuple[int, int] = (10, 5), finish_reason: str = "stop") -> dict[str, Any]:
    """A chat completion as an OpenAI-compatible endpoint gives it."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    return {"id": "1", "object": "chat.completion", "model": "judge", "choices": [choice], "usage": usage}
