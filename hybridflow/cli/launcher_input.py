"""Standard input of an agent whose launcher holds it open: the run's token, then signals; its end is the launcher's.

A launcher that reaches a host by a connection (`launch/ssh.sh`, `launch/slurm.sbatch`) has no other way in that nobody
else sees, and none that is also left when the launcher is killed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

from engine3d.errors import UserError
from hybridflow.cluster.hosts.run_token import TOKEN

_SIGNALS = {b"INT": signal.SIGINT, b"TERM": signal.SIGTERM, b"USR1": signal.SIGUSR1}


def obey_standard_input() -> None:
    """Take the run's token from the first line of standard input, as if it stood in the environment.

    Each later line is INT, TERM or USR1, which this process then gets; the end of input is TERM. Standard input is
    /dev/null from here on, for this process and all that it starts.

    Raises:
        UserError: standard input has ended before the token.
    """
    descriptor = os.dup(0)  # which no other process inherits
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    lines = _lines(descriptor)
    token = next(lines, None)
    if token is None:
        raise UserError("--stdin: standard input has ended; expected the run's token on its first line")
    os.environ[TOKEN] = token.decode("utf-8", "replace")

    def obey() -> None:
        for line in lines:
            if (number := _SIGNALS.get(line)) is not None:
                _send(number)
        _send(signal.SIGTERM)

    threading.Thread(target=obey, name="launcher", daemon=True).start()


def _send(number: signal.Signals) -> None:
    # To the main thread: one that waits in a system call is to wake up.
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Whole lines, without what ends them."""
    pending = b""
    while read := os.read(descriptor, 4096):
        *lines, pending = (pending + read).split(b"\n")
        yield from lines
