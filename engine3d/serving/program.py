"""The process that is an SGLang server, for one client: it lives as long as its client does.

It leads a session of its own, because SGLang kills the whole process tree of the parent of a process that fails. What
it is to serve comes as one line of JSON on its standard input, which its client holds open for as long as it wants it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

from engine3d.run_files import RUN_DIRECTORY_VARIABLE, remove_run_files
from engine3d.stacks import write_stacks_on_request
from engine3d.startup.imports import quick_imports

_PARENT_POLL_S = 1.0


class _WithoutKey(logging.Filter):
    """SGLang writes all of its arguments into the log, the key too."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace(self._key, "<key>")
        return True


def _end() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    remove_run_files(Path(os.environ[RUN_DIRECTORY_VARIABLE]))
    os.killpg(0, signal.SIGKILL)


def _watch(client: int) -> None:
    """End everything when the client goes or closes its end."""

    def until_closed() -> None:
        while sys.stdin.buffer.read(1):
            pass
        _end()

    def until_gone() -> None:
        while os.getppid() == client:
            time.sleep(_PARENT_POLL_S)
        _end()

    for action in (until_closed, until_gone):
        threading.Thread(target=action, name="client watch", daemon=True).start()


def main() -> None:
    """Serve until the client goes."""
    write_stacks_on_request()
    launch = json.loads(sys.stdin.buffer.readline())
    _watch(launch["client"])
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_WithoutKey(launch["arguments"]["api_key"]))
    with quick_imports():
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs
    with contextlib.suppress(SystemExit):  # how uvicorn ends; the log says why
        launch_server(ServerArgs(**launch["arguments"]))
    _end()  # SGLang has threads that would keep this process


if __name__ == "__main__":
    main()
