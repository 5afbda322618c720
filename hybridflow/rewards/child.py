"""The process that runs one user's reward function. Started as a script, with the standard library alone.

It is two processes. The worker loads the function and serves one call after another over a socket; messages are JSON,
each behind its length in 4 bytes. The supervisor holds the end of a pipe, the lifeline: when the parent closes it, on
purpose or by dying, the supervisor kills the worker with everything that the function started, whatever they are doing.

A call is answered as {"values": [...]}, with a number for each text, or in words why there is none. Where there is not
one for each, and where the function cannot be loaded, the answer is {"error": what}; the parent puts the name of the
reward in front.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_OPTIONAL_COLUMNS = ("prompts", "answers")


class RewardError(Exception):
    """A failure of the user's function, in words."""


def read_message(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message; None at the end of the stream. Raises TimeoutError past `deadline`, of the monotonic clock."""
    header = _read_exactly(connection, 4, deadline)
    body = None if header is None else _read_exactly(connection, struct.unpack("!I", header)[0], deadline)
    return None if body is None else json.loads(body)


def _read_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts = []
    while size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode_message(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def _load(path: str) -> Callable[..., Any]:
    module_name, _, function_name = path.rpartition(":")
    if module_name.endswith((".py", ".pkl")) and not Path(module_name).is_file():
        raise RewardError(f"file {module_name} does not exist (looked for from {Path.cwd()})")
    try:
        if not function_name:
            return _load_pickled(Path(module_name))
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(module_name).stem, module_name)
            if spec is None or spec.loader is None:
                raise RewardError(f"file {module_name} cannot be imported")
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except RewardError:
        raise
    except BaseException as error:
        raise RewardError(f"cannot be imported: {_describe(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"module {module_name} has no function {function_name!r}")
    return function


def _load_pickled(path: Path) -> Callable[..., Any]:
    """A callable as cloudpickle wrote it: no function that could be imported."""
    function = pickle.loads(path.read_bytes())
    if not callable(function):
        raise RewardError(f"file {path} holds {_show(function)}, expected a function")
    return function


def _wanted_columns(function: Callable[..., Any]) -> list[str]:
    """Which of "prompts" and "answers" to pass along. The first parameter takes the generated texts."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional or positional[0].name in _OPTIONAL_COLUMNS:
        raise RewardError("takes no positional argument for the generated texts, expected reward_fn(generated_texts)")
    passed = [] if positional[0].kind is positional[0].VAR_POSITIONAL else [positional[0].name]
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        known = parameter.name in _OPTIONAL_COLUMNS and parameter.kind is not parameter.POSITIONAL_ONLY
        if required and not known and parameter.name not in passed:
            raise RewardError(
                f"requires an argument {parameter.name!r}, expected reward_fn(generated_texts) "
                "with optional prompts and answers"
            )
    names = {parameter.name for parameter in parameters}
    return [column for column in _OPTIONAL_COLUMNS if takes_any or column in names]


def _describe(error: BaseException) -> str:
    """Type, message and place of an error, in one line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{place}: {message}" if message else f"{type(error).__name__}{place}"


def _call(function: Callable[..., Any], columns: Sequence[str], request: dict[str, Any]) -> list[float | str]:
    """What the function gives for each text: its number, or in words why it is none. RewardError if it is not one each.

    The text at fault is looked for where `find_sample` says so: the parent may call again with one text at a time.
    """
    texts, first = request["texts"], request["first"]
    deadline = time.monotonic() + request["timeout_s"] / 2
    try:
        returned = function(list(texts), **{column: list(request[column]) for column in columns})
        return check_values(returned, texts, first)
    except RewardError:
        raise
    except BaseException as error:
        sample = _failing_sample(function, columns, request, type(error), deadline)
        where = "" if sample is None else f" on sample {first + sample} ({texts[sample][:60]!r})"
        expected = "a number" if len(texts) == 1 else f"{len(texts)} numbers"
        raise RewardError(f"raised {_describe(error)}{where}; expected {expected}") from None


def _failing_sample(
    function: Callable[..., Any],
    columns: Sequence[str],
    request: dict[str, Any],
    kind: type[BaseException],
    deadline: float,
) -> int | None:
    """The first sample on which the function raises the same error alone, as far as half the time limit allows."""
    if len(request["texts"]) == 1:
        return 0
    if not request["find_sample"]:
        return None
    for index, text in enumerate(request["texts"]):
        if time.monotonic() > deadline:
            return None
        try:
            function([text], **{column: [request[column][index]] for column in columns})
        except kind:
            return index
        except BaseException:
            return None
    return None


def check_values(returned: Any, texts: Sequence[str], first: int) -> list[float | str]:
    """The value of each text as a float, or in words why it is no finite float32. The texts are those from `first` on.

    Raises RewardError where there is not one value for each text.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    expected = "a list of 1 number" if len(texts) == 1 else f"a list of {len(texts)} numbers"
    if not isinstance(values, list | tuple):
        raise RewardError(f"returned {_show(returned)}, expected {expected}")
    if len(values) != len(texts):
        raise RewardError(f"returned {len(values)} values for {len(texts)} generated texts, expected one for each")
    return [_check_value(value, first + index, texts[index]) for index, value in enumerate(values)]


def _check_value(value: Any, sample: int, text: str) -> float | str:
    try:
        number = value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # an array of several values
        number = None
    if not isinstance(number, int | float) or (isinstance(number, float) and not math.isfinite(number)):
        return f"returned {_show(value)} for sample {sample} ({text[:60]!r}), expected a finite number"
    try:
        struct.pack("!f", float(number))
    except OverflowError:
        return f"returned {str(number)[:60]} for sample {sample}, expected a number within the range of float32"
    return float(number)


def _show(value: Any) -> str:
    shown = " ".join(repr(value).split())
    return f"{shown[:60]} ({type(value).__name__})"


def _serve(connection: socket.socket) -> None:
    """Load the function, then answer calls until the parent closes the connection."""
    setup = read_message(connection)
    if setup is None:
        return
    sys.path[:] = setup["sys_path"]
    try:
        function = _load(setup["path"])
        columns = _wanted_columns(function)
    except RewardError as error:
        connection.sendall(encode_message({"error": str(error)}))
        return
    connection.sendall(encode_message({"loaded": True}))
    while (request := read_message(connection)) is not None:
        try:
            reply: dict[str, Any] = {"values": _call(function, columns, request)}
        except RewardError as error:
            reply = {"error": str(error)}
        connection.sendall(encode_message(reply))


def _supervise(worker: int, lifeline: int, parent: int) -> NoReturn:
    """Wait for the end of the worker or of the parent, kill what is left of the worker's group, and end as it did."""
    worker_end = os.pidfd_open(worker)
    # The look at the parent is for a lifeline that outlives it in a process that it forked.
    while os.getppid() == parent and not select.select([lifeline, worker_end], [], [], 1.0)[0]:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _main(connection_fd: int, lifeline: int, parent: int) -> None:
    worker = os.fork()
    if worker == 0:
        os.setpgid(0, 0)
        os.close(lifeline)
        with contextlib.suppress(BrokenPipeError):  # the parent has closed the connection and waits for no answer
            _serve(socket.socket(fileno=connection_fd))
        return
    with contextlib.suppress(OSError):  # whichever of the two is first
        os.setpgid(worker, worker)
    os.close(connection_fd)
    _supervise(worker, lifeline, parent)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
