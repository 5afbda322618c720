"""Runs in place of the interpreter: `python -ISE launcher.py ARGUMENTS...` asks a server to fork what they name.

As long as the forked process lives this one does: signals go on to it, it is killed when this one is, and this one ends
as it does. What the server has not preloaded is run by the interpreter itself. Imports next to nothing, so that it
takes no time.
"""

import _socket
import json
import os
import sys

FORWARDED = (1, 2, 3, 10, 12, 15)  # SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGTERM
COLD = "WARM_PYTHON_COLD"  # environment variable: a kind of process that the interpreter itself runs
COLLECTED = "WARM_PYTHON_COLLECTED"  # environment variable: paths of the tests that pytest-xdist's workers run, as JSON
LOST = 99  # exit code where the server is gone; of descriptors none is left to say so
AGENTS = ("/ray/dashboard/", "/ray/_private/runtime_env/agent/")
EXECNET = "import sys;exec(eval(sys.stdin.readline()))"  # by which pytest-xdist starts a worker


def kind_of(arguments: list[str]) -> str | None:
    """Return which process of the server has imported what these arguments run, or None if none has."""
    if arguments[:1] == ["-u"]:  # as torchrun starts its script
        arguments = arguments[1:]
    if not arguments:
        return None
    if any(name in word for word in arguments for name in AGENTS):
        return "head"
    if arguments[:3] == ["-P", "-m", "engine3d.rollout.host.program"]:
        return "host"
    if arguments[0] == "-P" and arguments[1].endswith("/hybridflow/cluster/ray/ray_node.py"):
        return "head"
    if any(word.endswith("/ray/_private/workers/default_worker.py") for word in arguments):
        return "rank"
    if arguments == ["-c", EXECNET]:
        return "worker"
    if arguments[0] == "-m" and arguments[1].split(".")[0] in ("hybridflow", "tests"):
        return "driver"
    if arguments[:2] == ["-m", "torch.distributed.run"]:
        return "driver"
    if arguments[0].endswith(".py") and "/ray/" not in arguments[0]:
        return "driver"
    return None


def ask(
    path: str,
    arguments: list[str],
    environment: dict[str, str],
    descriptors: list[int],
    numbers: list[int] | None = None,
) -> tuple[_socket.socket, int]:
    """Ask the server that listens at a path for a process; the connection to it, and the process or 0 if it refuses.

    Args:
        path: of the server's socket.
        arguments: of the interpreter.
        environment: of the process.
        descriptors: that the process gets.
        numbers: of these descriptors in the process; those here if None.
    """
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    mask = os.umask(0o022)
    os.umask(mask)
    request = {
        "arguments": arguments,
        "environment": environment,
        "directory": os.getcwd(),  # noqa: PTH109
        "descriptors": numbers or descriptors,
        "launcher": os.getpid(),
        "leads": os.getsid(0) == os.getpid(),
        "umask": mask,
    }
    data = json.dumps(request).encode()
    packed = b"".join(descriptor.to_bytes(4, "little") for descriptor in descriptors)
    sent = server.sendmsg([len(data).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
    assert sent == 4
    while data:
        data = data[server.send(data) :]
    return server, int.from_bytes(_exactly(server, 4), "little")


def main(arguments: list[str]) -> None:
    interpreter = sys.executable
    kind = kind_of(arguments)
    if kind is None or kind == os.environ.get(COLD):
        os.execv(interpreter, [interpreter, *arguments])
    descriptors = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            os.fstat(int(name))
        except OSError:
            continue  # of the directory itself
        descriptors.append(int(name))
    try:
        server, process = ask(os.path.dirname(__file__) + "/" + kind, arguments, dict(os.environ), descriptors)  # noqa: PTH120
    except OSError:
        os.execv(interpreter, [interpreter, *arguments])
    if process == 0:
        server.close()
        os.execv(interpreter, [interpreter, *arguments])
    import signal

    def forward(number: int, _: object) -> None:
        try:  # noqa: SIM105
            os.kill(process, number)
        except ProcessLookupError:
            pass

    for number in FORWARDED:
        signal.signal(number, forward)
    for descriptor in descriptors:  # whoever waits for their end waits for the forked process
        os.close(descriptor)
    code = int.from_bytes(_exactly(server, 4), "little", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != 9 else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exactly(server: _socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = server.recv(count - len(data))
        if not more:
            os._exit(LOST)
        data += more
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
