"""The process that runs one user's reward function. Started by `supervisor.py`, with the standard library alone.

It loads the function and serves one call after another over a socket; messages are JSON, each behind its length in 4
bytes. A call is answered as {"call": its number, "values": [...], "metrics": {...}, "counts": {...}}, with a number for
each text, or the reason for none in words, and metrics of each by name. If there is not one for each, or if the
function cannot be loaded, the answer is {"error": reason}. The parent puts the name of the reward in front. The code
that runs here is the user's: the parent checks every answer.

A class in place of a function is made once, with the arguments of its settings, and its instance is called. If it has a
method `prepare`, that is given the names of the data's fields before the first call, and returns which columns the
instance is called with; `timeout_s`, the limit of the call in seconds, is passed along with them. An
attribute `needs_answers` is true if it cannot score without answers, `takes_threads` if several threads may call it.

What a setup names as its `server` serves the loaded object in its own way: environments.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import os
import pickle
import re
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

OPTIONAL_COLUMNS = ("prompts", "answers")
MOST_METRICS = 32
"""Metrics of each sample, by name, that a function may give next to its numbers."""
_OF_MESSAGES = "; it gets texts, not messages as of TRL: completion in place of completion[0]['content']"
LOST_CONNECTION = 113
"""Exit code where the user's code has closed the socket to the parent."""
_METRIC = re.compile(r"[A-Za-z]\w{0,59}", re.ASCII)
_OTHER_METRICS = ("mean", "failed")
_LARGEST_METRIC = 1e30


class RewardError(Exception):
    """A failure of the user's function, in words."""


class NoRewardError(Exception):
    """Reason for a sample without a reward."""


def read_message(
    connection: socket.socket, deadline: float | None = None, most_bytes: int = (1 << 32) - 1
) -> Any | None:
    """The next message; None at the end of the stream.

    Raises:
        TimeoutError: past `deadline`, of the monotonic clock.
        ValueError: it is larger than `most_bytes`, or no message.
    """
    header = _read_exactly(connection, 4, deadline)
    if header is None:
        return None
    size = struct.unpack("!I", header)[0]
    if size > most_bytes:
        raise ValueError(f"a message of {size} bytes, expected at most {most_bytes}")
    body = _read_exactly(connection, size, deadline)
    try:
        return None if body is None else json.loads(body)
    except RecursionError:
        raise ValueError("a message that is nested too deeply") from None


def _read_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    chunks = []
    while size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        chunk = connection.recv(min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def encode_message(message: dict[str, Any]) -> bytes:
    """The bytes of a message."""
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


def load_callable(path: str, directory: str) -> Callable[..., Any]:
    """Import what a path names. Raises RewardError, in words that follow the path. `directory`: of relative files."""
    module_name, _, function_name = path.rpartition(":")
    if module_name.endswith((".py", ".pkl")) and not Path(module_name).is_file():
        kind = "is no file" if Path(module_name).exists() else "does not exist"
        raise RewardError(f"file {module_name} {kind}")
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
            _prefer(module_name.partition(".")[0], directory)
            module = importlib.import_module(module_name)
    except RewardError:
        raise
    except BaseException as error:
        raise RewardError(f"cannot be imported: {describe(error)}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"module {module_name} has no function {function_name!r}")
    return function


def _prefer(name: str, directory: str) -> None:
    """Import a module or package from the directory in preference to one of the same name elsewhere."""
    spec = importlib.machinery.PathFinder.find_spec(name, [directory])
    if name not in sys.modules and spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def _load_pickled(path: Path) -> Callable[..., Any]:
    """A callable as cloudpickle wrote it: no function that could be imported."""
    function = pickle.loads(path.read_bytes())
    if not callable(function):
        raise RewardError(f"file {path} holds {_show(function)}, expected a function")
    return function


def _requested_columns(function: Callable[..., Any], fields: Sequence[str] | None) -> list[str]:
    """Columns that a function takes, of "prompts", "answers" and the data's fields, by the names of its parameters.

    The first parameter takes the generated texts. Where the fields are not known, None, any name may be one.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return []
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    if not positional:
        raise RewardError("takes no positional argument for the generated texts, expected reward_fn(generated_texts)")
    if (first := positional[0].name) in OPTIONAL_COLUMNS:
        others = [parameter.name for parameter in parameters if parameter is not positional[0]]
        texts = "completions" if "completions" in others else "generated_texts"
        raise RewardError(f"takes {first} first, expected the generated texts there: reward_fn({texts}, {first}, ...)")
    passed = [] if positional[0].kind is positional[0].VAR_POSITIONAL else [positional[0].name]
    offered = dict.fromkeys([*OPTIONAL_COLUMNS, *(fields or ())])
    for name in passed:
        offered.pop(name, None)
    for parameter in parameters:
        required = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        known = parameter.name in offered and parameter.kind is not parameter.POSITIONAL_ONLY
        if required and not known and parameter.name not in passed and fields is not None:
            has = f" and fields of the data ({', '.join(fields)})" if fields else "; the data have no other fields"
            raise RewardError(
                f"requires an argument {parameter.name!r}, expected reward_fn(generated_texts) "
                f"with optional prompts, answers{has}"
            )
    names = {parameter.name for parameter in parameters}
    if twice := [name for name in OPTIONAL_COLUMNS if name in (fields or ()) and name in names]:
        raise RewardError(f"asks for {twice[0]!r}, which is a field of the data too, expected another name of it there")
    return [column for column in offered if takes_any or column in names]


def _needs_answers(function: Callable[..., Any], columns: Sequence[str]) -> bool:
    """True where a function cannot score a sample without a reference answer: its `answers` have no default.

    The instance of a class may say otherwise by its attribute `needs_answers`.
    """
    if "answers" not in columns:
        return False
    try:
        parameter = inspect.signature(function).parameters.get("answers")
    except (TypeError, ValueError):
        parameter = None
    default = hasattr(function, "prepare") or (parameter is not None and parameter.default is parameter.empty)
    return bool(getattr(function, "needs_answers", default))


def _with_arguments(function: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """The function with arguments of its settings, or the instance of a class. RewardError for one it does not take."""
    if isinstance(function, type):
        return _instance(function, arguments)
    if not arguments:
        return function
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise RewardError(f"has no parameters that can be known, expected no arguments, not {arguments}") from None
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in arguments:
        if name in OPTIONAL_COLUMNS or name == next(iter(parameters), None):
            raise RewardError(f"gets {name!r} of each sample, expected another of its arguments in the settings")
        if name not in named and not takes_any:
            raise RewardError(f"takes no argument {name!r}, expected of {', '.join(map(repr, named[1:])) or 'none'}")
    return functools.partial(function, **arguments)


def _of_verl(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Adapter of a function of verl's signature. None for any other function."""
    try:
        names = inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):
        return None
    if not names & {"solution_str", "solution_strs"}:
        return None
    from hybridflow.rewards.compute_score import adapted

    return adapted(function)


def _instance(kind: type, arguments: dict[str, Any]) -> Callable[..., Any]:
    try:
        made = kind(**arguments)
    except Exception as error:
        raise RewardError(f"cannot be made with its arguments: {describe(error)}") from None
    if not callable(made):
        raise RewardError(f"is a class without __call__, expected {kind.__name__}()(generated_texts)")
    return made


def _prepared_columns(function: Callable[..., Any], fields: Sequence[str] | None) -> list[str]:
    """Columns that the instance of a class requests by `prepare`. Raises RewardError, with the words of its
    ValueError."""
    try:
        return list(function.prepare(fields))  # type: ignore[attr-defined]
    except ValueError as error:
        raise RewardError(f"cannot be prepared: {' '.join(str(error).split())}") from None
    except Exception as error:
        raise RewardError(f"cannot be prepared: {describe(error)}") from None


def describe(error: BaseException) -> str:
    """Describe an error in one line: type, location and message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
    location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    try:
        message = " ".join(str(error).split())[:300]
    except Exception:  # of an error of the user's own
        message = ""
    return f"{type(error).__name__}{location}: {message}" if message else f"{type(error).__name__}{location}"


def _call(function: Callable[..., Any], columns: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    """Answer a call with the function's value for each text. Raises RewardError if it is not one value each.

    The text at fault is searched for if `find_sample` is set. Else the parent may call again with one text at a time.
    """
    texts, first = request["texts"], request["first"]
    deadline = time.monotonic() + request["timeout_s"] / 2
    try:
        returned = function(list(texts), **{column: list(request["columns"][column]) for column in columns})
        return _answer(returned, texts, first)
    except RewardError:
        raise
    except BaseException as error:
        sample = _failing_sample(function, columns, request, type(error), deadline)
        where = "" if sample is None else f" on sample {first + sample} ({texts[sample][:60]!r})"
        expected = "a number" if len(texts) == 1 else f"{len(texts)} numbers"
        hint = _OF_MESSAGES if str(error).startswith("string indices must be integers") else ""
        raise RewardError(f"raised {describe(error)}{where}; expected {expected}{hint}") from None


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
            function([text], **{column: [request["columns"][column][index]] for column in columns})
        except kind:
            return index
        except BaseException:
            return None
    return None


def _answer(returned: Any, texts: Sequence[str], first: int) -> dict[str, Any]:
    """Check a function's return value: `values`, and `metrics` and `counts` where it gives them."""
    if not isinstance(returned, dict):
        return {"values": check_values(returned, texts, first)}
    if "rewards" not in returned or not returned.keys() <= {"rewards", "metrics", "counts"}:
        raise RewardError(
            f"returned a dictionary of {_show(list(returned))}, expected 'rewards', and if any 'metrics' and 'counts'"
        )
    given = {kind: check_metrics(kind, returned.get(kind, {}), len(texts)) for kind in ("metrics", "counts")}
    return {"values": check_values(returned["rewards"], texts, first), **given}


def check_metrics(kind: str, metrics: Any, count: int) -> dict[str, list[float | None]]:
    """Check metrics of `count` texts, by name: finite numbers, None where a text has none. Raises RewardError."""
    if not isinstance(metrics, dict) or len(metrics) > MOST_METRICS:
        raise RewardError(f"returned {kind} {_show(metrics)}, expected lists by name, at most {MOST_METRICS}")
    checked: dict[str, list[float | None]] = {}
    for name, column in metrics.items():
        if not isinstance(name, str) or not _METRIC.fullmatch(name) or name in _OTHER_METRICS:
            other = " or ".join(_OTHER_METRICS)
            raise RewardError(f"returned {kind} named {_show(name)}, expected letters, digits and _, and not {other}")
        values = column.tolist() if hasattr(column, "tolist") else column
        if not isinstance(values, list | tuple) or len(values) != count or not all(map(_is_metric, values)):
            raise RewardError(
                f"returned {kind} {name!r} {_show(values)}, expected a number or None for each of {count} texts"
            )
        checked[name] = [None if value is None else float(value) for value in values]
    return checked


def _is_metric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and abs(value) < _LARGEST_METRIC)


def check_values(returned: Any, texts: Sequence[str], first: int) -> list[float | str]:
    """Check the value of each text: a float, or the reason in words if it is no finite float32. `first`: number of the
    first text.

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
    if isinstance(number, Exception):
        return f"gave none for sample {sample} ({text[:60]!r}): {' '.join(str(number).split())[:300]}"
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


def _end_copy(process: int) -> None:
    """End a process that the user's code has forked and let return from there: it is not the one that answers."""
    if os.getpid() != process:
        os._exit(0)


class ScoringFunction:
    """A reward function with its arguments, called with texts and the columns that it requests.

    Args:
        loaded: the function, or a class that is made.
        arguments: of the settings.
        fields: names of the data's fields; any name may be one if None.

    Raises:
        RewardError: it does not fit, in words that follow its name.
    """

    def __init__(self, loaded: Callable[..., Any], arguments: dict[str, Any], fields: Sequence[str] | None) -> None:
        self._function = _with_arguments(loaded, arguments)
        made = isinstance(loaded, type)
        if not made and (adapted := _of_verl(self._function)) is not None:
            self._function, made = adapted, True
        self._limited = made and hasattr(self._function, "prepare")
        self._arguments = () if made else tuple(arguments)
        self._fields: set[str] = set()
        self.columns = self._requested(fields)
        """Names of the columns that it is called with."""
        takes_threads = getattr(self._function, "takes_threads", False) is True
        self._turn = contextlib.nullcontext() if takes_threads else threading.Lock()

    def _requested(self, fields: Sequence[str] | None) -> list[str]:
        requested = (_prepared_columns if self._limited else _requested_columns)(self._function, fields)
        return [name for name in requested if name not in self._arguments]

    def know(self, fields: Iterable[str]) -> None:
        """Request columns anew if the data have fields that were not known. Raises RewardError as the construction."""
        if not self._fields.issuperset(fields):
            with self._turn:
                self._fields.update(fields)
                self.columns = self._requested(sorted(self._fields))

    @property
    def needs_answers(self) -> bool:
        """True if it cannot score a sample without a reference answer."""
        return _needs_answers(self._function, self.columns)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a call. Raises RewardError if it does not give one value for each text."""
        limited = self._limited
        called = functools.partial(self._function, timeout_s=request["timeout_s"]) if limited else self._function
        return _call(called, list(request["columns"]), request)

    def score(self, texts: Sequence[str], columns: dict[str, Any], timeout_s: float) -> list[float | str]:
        """Score texts. Returns a number for each, or the reason for none in words. Raises as `answer`.

        Several threads may call it: a function that does not take them is called by one after the other.
        """
        request = {"texts": texts, "columns": columns, "first": 0, "timeout_s": timeout_s, "find_sample": False}
        with self._turn:
            values: list[float | str] = self.answer(request)["values"]
        return values


def serve(connection: socket.socket) -> None:
    """Load the function, then answer calls until the parent closes the connection."""
    setup = read_message(connection)
    if setup is None:
        return
    process = os.getpid()
    sys.path[:] = setup["sys_path"]
    try:
        loaded = load_callable(setup["path"], setup["directory"])
        if (server := setup.get("server")) is not None:
            _end_copy(process)
            load_callable(server, setup["directory"])(connection, loaded, setup)
            return
        function = ScoringFunction(loaded, setup["arguments"], setup["fields"])
    except RewardError as error:
        _end_copy(process)
        connection.sendall(encode_message({"error": str(error)}))
        return
    _end_copy(process)
    connection.sendall(encode_message({"columns": function.columns, "needs_answers": function.needs_answers}))
    while (request := read_message(connection)) is not None:
        try:
            reply = function.answer(request)
        except RewardError as error:
            reply = {"error": str(error)}
        _end_copy(process)
        connection.sendall(encode_message({"call": request["call"], **reply}))
