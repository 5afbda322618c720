"""Program that runs `ray start` for one host of a run and holds Ray's servers, so that they end with the run.

    python -P ray_node.py

Reads one line of JSON with `path` (for imports), `directory` (for Ray's files), `address`, `cpus`, `gcs_address` (of
the cluster to join; null to be its head) and `ports` (such as `29400-31399`; null for any) and runs Ray's command.
Writes lines of JSON: first `gcs_address` and `processes` (process ids by name), unless a server ended before, or the
command was killed. For that, and for each server that ends later: its `name`, its
`pid`, whether it `exited`, and its `status`, exit code or signal. If Ray's command fails, this program ends
with its exit code, and Ray's reason is in standard error. Ends the servers, and itself, once its standard input closes.
Those alive at that moment are first named in the file `ended` (`hybridflow.cluster.processes.watchdog`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

SERVERS = ("gcs_server", "raylet")
# Optional libraries of Ray's command. Without grpc it starts no server of Ray Client, which asks nobody for a token.
# Imports of the others take longer than Ray's start.
LEFT_OUT = ("grpc", "ray.serve", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli")
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_LOOPBACK = "127.0.0.1"
_LOOK_EVERY_S = 0.1
_AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def main() -> int:
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    # What Ray prints is for its log; lines of this program are for who reads them.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ports = _Ports(settings["address"], settings["ports"])
    gcs_address = settings["gcs_address"] or _address(settings["address"], ports.reserve())
    words = _words(settings, gcs_address, ports)
    _adopt(True)  # Ray's servers become this process's children when Ray's command ends
    command = os.fork()
    if command == 0:
        answers.close()
        _run(words)
    code, servers = _started(command, answers)
    _adopt(False)
    if code:
        return code
    ports.close()
    _say(answers, gcs_address=gcs_address, processes={name: pid for pid, name in servers.items()})
    left = _hold(answers, servers)
    with contextlib.suppress(OSError):  # nobody reads it where its directory is gone
        Path(settings["ended"]).write_text(" ".join(map(str, left)))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


class _Ports:
    """Ports that this process keeps from all others until Ray's servers listen there.

    Ray's servers bind with SO_REUSEADDR, so that a socket that does not listen is not in their way.

    Args:
        address: of this host, at which the servers are reached.
        ports: first and last port of a range; any ports if None.
    """

    def __init__(self, address: str, ports: str | None) -> None:
        self._address = address
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._sockets: list[socket.socket] = []
        first, last = map(int, (ports or "0-0").split("-"))
        self.workers = (first, last)
        """First and last port of what is left of the range; zeros for any ports."""

    def reserve(self) -> int:
        """A free port, the last one of a range.

        Raises:
            OSError: no port of the range is free.
        """
        first, last = self.workers
        for port in range(last, first - 1, -1):
            reserved = socket.socket(self._family)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                reserved.bind((self._address, port))
            except OSError as error:
                reserved.close()
                why = error.strerror
                continue
            self._sockets.append(reserved)
            self.workers = (first, max(first, port - 1))
            return int(reserved.getsockname()[1])
        raise OSError(f"no free port of {first}-{last} at {self._address}: {why}")

    def occupy(self) -> int:
        """A port of the loopback interface at which nobody else can listen."""
        self._sockets.append(socket.create_server((_LOOPBACK, 0)))
        return int(self._sockets[-1].getsockname()[1])

    def close(self) -> None:
        """Release the ports, where Ray's servers listen by now."""
        for reserved in self._sockets:
            reserved.close()


def _words(settings: dict[str, Any], gcs_address: str, ports: _Ports) -> list[str]:
    """Arguments of Ray's command.

    The port of the runtime environment agent is given: a raylet would wait until the agent names its own, and end where
    that takes longer than 15 s.
    """
    words = [
        "start",
        f"--node-ip-address={settings['address']}",
        f"--temp-dir={settings['directory']}",
        f"--num-cpus={settings['cpus']}",
        "--include-log-monitor=false",
        *(f"--{name}-port={ports.reserve()}" for name in ("node-manager", "object-manager", "runtime-env-agent")),
    ]
    first, last = ports.workers
    words += [f"--min-worker-port={first}", f"--max-worker-port={last}"]
    if settings["gcs_address"] is not None:
        return [*words, f"--address={gcs_address}"]
    return [
        *words,
        "--head",
        f"--port={gcs_address.rpartition(':')[2]}",
        "--no-monitor",
        "--disable-usage-stats",
        # Without a dashboard its server reports usage alone, and Ray would wait 2 s for it. A taken port keeps it out:
        # Ray logs that and continues.
        "--include-dashboard=false",
        f"--dashboard-host={_LOOPBACK}",
        f"--dashboard-port={ports.occupy()}",
    ]


def _run(words: list[str]) -> NoReturn:
    """Run Ray's command, in a process forked for it."""
    sys.modules.update(dict.fromkeys(LEFT_OUT))  # type: ignore[arg-type]  # None: an import raises
    from ray.scripts.scripts import main as ray

    sys.stdin.close()
    sys.argv = ["ray", *words]
    code: Any = 1
    try:
        ray()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        print(" ".join(str(error).split()) or type(error).__name__, file=sys.stderr)
    sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _started(command: int, answers: Any) -> tuple[int, dict[int, str]]:
    """Wait for Ray's command; its exit code, and names of the servers by process id.

    The command would wait for the node of a dead server until a limit of its own. It is killed where one ends.
    """
    ending, servers, skips = os.pidfd_open(command), dict[int, tuple[int, str]](), False
    while True:
        for pid, name in _children(command):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if name in SERVERS and pid not in [known for known, _ in servers.values()]:
                    servers[os.pidfd_open(pid)] = (pid, name)
                if name == "raylet" and not skips:
                    skips = _skip_dashboard_agent(pid)
        ready, _, _ = select.select([ending, *servers], [], [], _LOOK_EVERY_S)
        if ending in ready:
            ended = _how_ended(command)
            if not ended["exited"]:
                _say(answers, name="ray start", **ended)
            return ended["status"], dict(servers.values())
        if ready:
            os.kill(command, signal.SIGKILL)
            os.waitpid(command, 0)
            pid, name = servers[ready[0]]
            _say(answers, name=name, **_how_ended(pid))
            return 1, {}


def _children(pid: int) -> Iterable[tuple[int, str]]:
    """Process id and name of every child of a process."""
    import psutil

    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield child.pid, child.name()


def _skip_dashboard_agent(raylet: int) -> bool:
    """Spare a raylet the wait for its dashboard agent, and its end where that takes longer than 15 s.

    The raylet waits for files that say where the agent serves. This writes what the agent does without a dashboard.
    Ray's command has flags for these ports, and does not pass all of them on.

    Returns:
        False if the raylet shows no command line: it begins, or has ended.
    """
    words = Path(f"/proc/{raylet}/cmdline").read_text().split("\0")
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
    if "session_dir" not in flags:
        return False
    for name in _AGENT_PORTS:
        file = Path(flags["session_dir"]) / f"{name}_{flags['node_id']}"
        written = file.with_suffix(".new")
        written.write_text("-1")
        written.rename(file)
    return True


def _hold(answers: Any, servers: dict[int, str]) -> list[int]:
    """Wait until standard input closes, and report each server that ends before; those alive then."""
    alive = {os.pidfd_open(pid): pid for pid in servers}
    while True:
        ready, _, _ = select.select([0, *alive], [], [])
        ready, _, _ = select.select([0, *alive], [], [], 0.0)  # what has ended by itself before that closed
        for descriptor in set(ready) & alive.keys():
            pid = alive.pop(descriptor)
            _say(answers, name=servers[pid], **_how_ended(pid))
        if 0 in ready and not os.read(0, 4096):
            return list(alive.values())


def _how_ended(pid: int) -> dict[str, Any]:
    result = os.waitid(os.P_PID, pid, os.WEXITED)
    assert result is not None
    return {"pid": pid, "exited": result.si_code == os.CLD_EXITED, "status": result.si_status}


def _adopt(does: bool) -> None:
    """Adopt orphans of this process's descendants as its children, or adopt none."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(does), 0, 0, 0)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(answers: Any, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        print(json.dumps(fields), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main())
