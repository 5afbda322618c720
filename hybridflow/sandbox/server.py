"""Server of a sandbox: runs the programs that clients post, if they know the token."""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from engine3d.errors import UserError
from hybridflow.sandbox.local import LocalSandbox
from hybridflow.sandbox.program import SandboxError
from hybridflow.sandbox.wire import MOST_BYTES, PATH, decode_program, encode_result

_WAITING = 4096
"""Most requests that wait for a slot. Further ones are refused, to be sent again."""
_IDLE_S = 120.0
_BLOCK = 1 << 16
_MOST_DIGITS = 20


class SandboxServer:
    """HTTP server in threads of its own. Programs are started by the thread of the event loop that makes it.

    Args:
        sandbox: that runs the programs.
        host, port: to listen at. Port 0 for any.
        token: that a request has to bring.

    Raises:
        UserError: the address cannot be used.
    """

    def __init__(self, sandbox: LocalSandbox, host: str, port: int, token: str) -> None:
        self._sandbox, self._token = sandbox, token
        self._loop = asyncio.get_running_loop()
        self._slots = threading.BoundedSemaphore(_WAITING)
        try:
            self._server = _ProgramServer((host, port), self._handler())
        except OSError as error:
            raise UserError(f"sandbox: cannot listen at {host}:{port}: {error.strerror}") from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> str:
        """URL of the server."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Take no more requests. From another thread than the event loop's."""
        self._server.shutdown()
        self._server.server_close()

    def is_open_to(self, authorization: str) -> bool:
        """True if this is the token, as a header of a request."""
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode())

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and content of the answer to a request with the token."""
        if path != PATH:
            return 404, {"error": f"expected {PATH}"}
        try:
            program = decode_program(json.loads(body))
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"no program: {error}"}
        if not self._slots.acquire(blocking=False):
            return 503, {"error": f"{_WAITING} programs are waiting"}
        try:
            result = asyncio.run_coroutine_threadsafe(self._sandbox.run(program), self._loop).result()
        except (SandboxError, UserError) as error:
            return 503, {"error": str(error)}
        finally:
            self._slots.release()
        return 200, encode_result(result)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = _IDLE_S

            def do_POST(self) -> None:
                text = self.headers.get("Content-Length", "")
                length = int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else MOST_BYTES + 1
                if length > MOST_BYTES:
                    self.close_connection = True
                    self._reply(413, {"error": f"expected Content-Length of at most {MOST_BYTES}"})
                elif not server.is_open_to(self.headers.get("Authorization", "")):
                    for begin in range(0, length, _BLOCK):  # a stranger's is kept nowhere
                        self.rfile.read(min(_BLOCK, length - begin))
                    self._reply(401, {"error": "another token than the server's, expected Authorization: Bearer"})
                else:
                    self._reply(*server.answer(self.path, self.rfile.read(length)))

            def _reply(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


class _ProgramServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
