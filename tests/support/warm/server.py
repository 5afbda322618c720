"""A server of `tests.support.warm`: has imported what one kind of process needs, and forks what `launcher` asks for.

    python -m tests.support.warm.server KIND SOCKET EXECUTABLE

Standard input is a socket that listens. A forked process gets arguments, environment, working directory and
descriptors of its launcher, and is killed when that one is gone; all are when standard output closes. What one kind of
process needs is imported for the first of them, in its environment. One whose environment makes a difference to imports
is not forked: its launcher runs the interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import itertools
import json
import os
import platform
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

from engine3d.startup import leave_out
from engine3d.startup.imports import quick_imports
from tests.support.warm import launcher

_READ_ON_IMPORT = (
    *("ENGINE3D_QUICK", "TORCH", "PYTORCH", "OMP_", "MKL_", "GOMP_", "KMP_", "SGLANG", "SGL_", "CUDA", "LD_", "HF_"),
    *("TRITON", "NVTE_", "PYTHONWARNINGS", "PYTHONHASHSEED", "LC_", "LANG"),
    *("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",),
)
_READ_LATER = (
    *("SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"),
    # In an engine's start and in its groups: those of a host's shard of an engine on several.
    *("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"),
    "SGLANG_DISABLED_MODEL_ARCHS",  # when a model is loaded: no server imports one
    "SGLANG_MAMBA_CONV_DTYPE",  # when a model's configuration is
    "TORCHINDUCTOR_CACHE_DIR",  # when something is compiled, which sets it to its default
    # When the recorder of operations is made, and at the end of an operation: in the directory of each run.
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"),
    # By torchrun's script, which is told of its agent, and by process groups.
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
_OF_RAY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set by drivers, unless Ray is on several hosts. Hosts have it of the rank that starts them."""
_MOST_DESCRIPTORS = 64
_OUT_OF_THE_WAY = 1000
_FOUND_HERE = [entry for entry in sys.path if entry]


_PROCESSES = os.open("/proc/self/ns/pid", os.O_RDONLY)
"""Namespace of this server's processes."""
_NUMBERS = itertools.count()
_IDS_OF_RAY = 32
"""Random ids of Ray that a process may draw before the next one's begin."""

_MODULES = {
    "driver": (
        *("transformers", "hybridflow.api.ppo_trainer", "hybridflow.cli.main"),
        *("hybridflow.planning.checks.recipe", "hybridflow.trainer.run"),
        # Imported when a run stores its first samples, and when it ends.
        *("pandas", "pyarrow.dataset", "pyarrow.pandas_compat", "numpy.ma", "ray.dag.compiled_dag_node"),
        "torch.utils.tensorboard",
        *("pydantic.v1.fields", "starlette.datastructures"),
    ),
    "head": (
        *("ray.scripts.scripts", "ray.dashboard.agent", "ray._private.runtime_env.agent.runtime_env_agent"),
        *("hybridflow.cluster.ray.ray_session", "aiohttp.web"),
        "ray.dashboard.modules.log.log_manager",
    ),
    # Not Ray, whose library reads its environment once, nor what imports it, but pure Python that Ray imports.
    "rank": (
        *("transformers", "jsonschema", "requests", "yaml"),
        *("pydantic.v1.fields", "starlette.datastructures", "msgpack", "wcwidth"),
        *("google.protobuf.json_format", "google.protobuf.timestamp_pb2"),
        *("hybridflow.roles.policy", "hybridflow.roles.value", "megatron.core.models.mimo.model.base"),
        *("tabulate", "engine3d.checkpoint.reading.load"),
        *("engine3d.checkpoint.writing.save", "engine3d.checkpoint.writing.writer", "engine3d.models.build"),
        *("engine3d.models.files.weights", "engine3d.rollout.engine", "engine3d.training.engine"),
        *("hybridflow.algorithms.losses.policy", "hybridflow.data.tokenizer", "hybridflow.rewards.functions"),
        "hybridflow.workers.rank_process",
    ),
    "test_rank": ("tests.support.preloaded",),
    "host": (
        *("transformers", "sglang.srt.entrypoints.engine", "engine3d.rollout.scheduler.plugin"),
        *("sglang.srt.model_executor.model_runner", "engine3d.rollout.host.messages"),
        *("engine3d.rollout.host.messages", "engine3d.rollout.host.log"),
    ),
}


_LEFT_OUT = ("ray.serve", "ray.util.state.state_cli", "ray.dashboard.modules.job.cli")
"""Modules that Ray's command of a run does without, and whose imports take longest."""
_NOT_IN_A_HOST = ("ray", "sglang.srt.models.registry")
"""Modules whose imports read variables in which hosts differ."""


def _import(kind: str) -> None:
    if kind == "worker":
        _collect(json.loads(os.environ[launcher.COLLECTED]))
        return
    if kind == "host":
        leave_out("megatron.core")  # as the plugin does
    left_out = _LEFT_OUT if kind == "head" else ()
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]  # None: an import raises
    with quick_imports():
        for name in _MODULES[kind]:
            importlib.import_module(name)
    for name in left_out:  # its own processes leave out more
        del sys.modules[name]
    if kind == "host":
        _hook_methods_once()


def _collect(paths: list[str]) -> None:
    """Import all test modules, and by them nearly everything: a worker's own collection finds them imported."""
    import pytest

    with quick_imports(), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        pytest.main(["--collect-only", "-p", "no:cacheprovider", *paths])
    # Arrow's allocator has one, which it starts again in a forked process.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


def _may_fork(kind: str) -> bool:
    """True unless this process has asked for GPUs, by which those of a forked one are unusable."""
    torch = sys.modules.get("torch")
    return kind != "worker" or torch is None or not torch.cuda.is_available()


def _hook_methods_once() -> None:
    """Spare engines the search of all modules for names of the methods that they hook, which none has."""
    from sglang.srt.plugins import hook_registry

    propagate = hook_registry._propagate_patch

    def of_functions(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else propagate(original, wrapped, source)

    hook_registry._propagate_patch = of_functions


def seen_by_imports(kind: str, environment: dict[str, str]) -> dict[str, str]:
    """The variables by which imports, and libraries once loaded, differ."""
    ignored = (*_READ_LATER, _OF_RAY) if kind != "test_rank" else _READ_LATER  # a rank imports Ray itself
    return {
        name: value for name, value in environment.items() if name.startswith(_READ_ON_IMPORT) and name not in ignored
    }


class _Forked:
    """A launcher and the process that was forked for it."""

    def __init__(self, connection: socket.socket) -> None:
        head, self.received, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
        size, data = int.from_bytes(head, "little"), b""
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
        self.connection = connection
        if len(head) < 4 or len(data) < size:  # its launcher was killed
            self._close_received()
            raise ConnectionError
        self.request: dict[str, Any] = json.loads(data)

    def fork(self, executable: str) -> None:
        """Fork the process; `process` and the descriptor `ended` are its.

        A launcher on a host of `tests.support.hosts` has it forked there.

        Raises:
            OSError: the host has ended.
        """
        host = _host_of(self.connection)
        self.request["number"] = next(_NUMBERS)
        if host is None:
            self.process = os.fork()
        else:
            os.setns(host, os.CLONE_NEWPID)  # which is for children alone
            self.process = -1
            try:
                self.process = os.fork()
            finally:
                if self.process:
                    os.setns(_PROCESSES, os.CLONE_NEWPID)
        if self.process == 0:
            try:
                if host is not None:
                    os.setns(host, os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWIPC | os.CLONE_NEWNET)
                    platform._uname_cache = None  # type: ignore[attr-defined]
                _run(self.request, self.received, executable)
            finally:  # a host that has ended: never a second server
                os._exit(1)
        if host is not None:
            os.close(host)
        self._close_received()
        self.ended = os.pidfd_open(self.process)
        self._answer(_pid_inside(self.process))

    def refuse(self) -> None:
        """Make the launcher run the interpreter instead."""
        self._close_received()
        self._answer(0)
        self.connection.close()

    def kill(self) -> None:
        """Kill the process as the launcher would have been killed."""
        with contextlib.suppress(ProcessLookupError):
            if self.request["leads"]:
                os.killpg(self.process, signal.SIGKILL)
            else:
                os.kill(self.process, signal.SIGKILL)

    def close(self) -> None:
        """Once it has ended: tell its launcher how."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self._answer(code)
        self.connection.close()
        os.close(self.ended)

    def _answer(self, number: int) -> None:
        with contextlib.suppress(OSError):  # a launcher may be killed at any moment
            self.connection.sendall(number.to_bytes(4, "little", signed=True))

    def _close_received(self) -> None:
        for descriptor in self.received:
            os.close(descriptor)


def _host_of(connection: socket.socket) -> int | None:
    """Descriptor of the process that has connected, where its namespaces are not this server's."""
    size = struct.calcsize("3i")
    process, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if Path(f"/proc/{process}/ns/pid").stat().st_ino == os.fstat(_PROCESSES).st_ino:
        return None
    return os.pidfd_open(process)


def _pid_inside(process: int) -> int:
    """Return the pid of a process as its own namespace counts, which may have ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return process


def main(kind: str, executable: str) -> None:
    listening = socket.socket(fileno=0)
    imported: dict[str, str] | None = None
    may_fork = True
    connected: dict[int, _Forked] = {}
    running: dict[int, _Forked] = {}
    poll = select.poll()
    poll.register(listening, select.POLLIN)
    poll.register(1, 0)  # it closes with whoever started this server
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if 1 in ready:
            for one in running.values():
                one.kill()
            return
        for descriptor in ready:
            if descriptor in running:
                one = running.pop(descriptor)
                poll.unregister(descriptor)
                if connected.pop(one.connection.fileno(), None) is not None:
                    poll.unregister(one.connection)
                one.close()
            elif descriptor in connected:  # the launcher is gone
                poll.unregister(descriptor)
                connected.pop(descriptor).kill()
        if listening.fileno() not in ready:
            continue
        connection, _ = listening.accept()
        try:
            one = _Forked(connection)
        except ConnectionError:
            connection.close()
            continue
        environment = seen_by_imports(kind, one.request["environment"])
        if imported is None:
            imported = environment
            os.environ.clear()
            os.environ |= one.request["environment"]
            _import(kind)
            if early := [name for name in _NOT_IN_A_HOST if kind == "host" and name in sys.modules]:
                raise RuntimeError(f"imported before the environment of a host is known: {early}")
            if threading.active_count() > 1:
                raise RuntimeError(f"threads in a process that forks: {threading.enumerate()}")
            may_fork = _may_fork(kind)
        if not may_fork:
            one.refuse()
            continue
        if environment != imported:
            differing = {
                name: [imported.get(name), environment.get(name)]
                for name in imported.keys() | environment.keys()
                if imported.get(name) != environment.get(name)
            }
            with Path(executable).with_name("refused").open("a") as log:
                log.write(f"{kind}: {json.dumps(differing)}\n")
            one.refuse()
            continue
        try:
            one.fork(executable)
        except OSError as error:  # its launcher is gone, and the host with it
            print(f"{kind}: not forked: {error}", file=sys.stderr, flush=True)
            one.refuse()
            continue
        connected[connection.fileno()] = running[one.ended] = one
        poll.register(connection, select.POLLIN)
        poll.register(one.ended, select.POLLIN)


def _run(request: dict[str, Any], received: list[int], executable: str) -> NoReturn:
    """Run the program in the forked process."""
    code: Any = 1
    try:
        _prepare(request, received, executable)
        _execute(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code
        if not (code is None or isinstance(code, int)):
            print(code, file=sys.stderr)
    except BaseException:
        with contextlib.suppress(OSError):  # the launcher's standard error may be closed
            traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter's end does
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _prepare(request: dict[str, Any], received: list[int], executable: str) -> None:
    import fcntl

    os.setsid()
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for descriptor in received]
    os.closerange(0, _OUT_OF_THE_WAY)
    for descriptor, number in zip(moved, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ |= request["environment"]
    os.chdir(request["directory"])
    os.umask(request["umask"])
    asking = request["launcher"]
    process, getppid = os.getpid(), os.getppid
    os.getppid = lambda: _parent(asking) if os.getpid() == process else getppid()
    tempfile.tempdir = None  # which the environment names
    if request["arguments"] != ["-u", "-c", launcher.EXECNET]:  # tests ask for it by name
        sys.executable = executable
    with contextlib.suppress(OSError):
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # type: ignore[misc]  # noqa: SIM115
    if "psutil" in sys.modules:
        _know_parent(sys.modules["psutil"].Process)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "ray._private.ray_constants" in sys.modules:  # has read it
        sys.modules["ray._private.ray_constants"].ENABLE_RAY_CLUSTER = os.environ.get(_OF_RAY, "1") == "1"  # type: ignore[attr-defined]
    if "ray._raylet" in sys.modules:
        from hybridflow.cluster.ray.ray_session import forget_token

        forget_token()  # which reads the environment again
        for _ in range(request["number"] * _IDS_OF_RAY):  # forked processes would draw the same
            sys.modules["ray"].NodeID.from_random()


def _parent(launcher: int) -> int:
    """The parent of a launcher, which is taken for that of the process forked for it."""
    try:
        return int(Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 1


def _know_parent(kind: Any) -> None:
    """Make psutil return what `os.getppid` does: agents of Ray end where that is not their raylet."""
    of_others = kind.ppid

    @functools.wraps(of_others)  # and what psutil keeps beside it
    def parent(process: Any) -> int:
        return os.getppid() if process.pid == os.getpid() else int(of_others(process))

    kind.ppid = parent


def _execute(words: list[str]) -> None:
    if words[0].endswith("setup_worker.py"):  # which would run the next script in an environment of its own
        given_by_ray = "--serialized-runtime-env-context="
        [context] = [word.removeprefix(given_by_ray) for word in words if word.startswith(given_by_ray)]
        os.environ |= json.loads(context).get("env_vars", {})
        words = [word for word in words[1:] if not word.startswith((given_by_ray, "--language"))]
    safe = os.environ.get("PYTHONSAFEPATH", "") != ""
    while words[0] in ("-P", "-u"):
        safe, words = safe or words[0] == "-P", words[1:]
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*given, *(entry for entry in _FOUND_HERE if entry not in given)]
    if words[0] == "-m":
        sys.argv = words[1:]
        if not safe:
            sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    if words[0] == "-c":
        sys.argv = ["-c"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[1], vars(sys.modules["__main__"]))
        return
    sys.argv = words
    if not safe:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
