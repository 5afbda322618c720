"""Python functions as tools: their schemas, and calls with what a model wrote as arguments."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema

from engine3d.startup.imports import quick_imports
from hybridflow.environments.call_server import NonsenseError
from hybridflow.rewards.processes.function_process import RewardError, describe

_NAME = re.compile(r"[A-Za-z_]\w{0,50}", re.ASCII)
_MOST_ABANDONED = 32
"""Threads of calls that nobody waits for any more, with more of which a process ends itself."""


class ToolFailureError(Exception):
    """A tool failed for a reason that is not the model's fault. Its episode is dropped."""


class ArgumentsError(Exception):
    """The arguments of a call do not fit, in words for the model."""


class Tool:
    """A function that a model calls.

    Args:
        function: the function, or the instance of a class with `__call__`.

    Raises:
        RewardError: it has no schema, in words that follow its path.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._routine: Any = function if inspect.isroutine(function) else type(function).__call__
        named = function if inspect.isroutine(function) else type(function)
        self.name = str(getattr(function, "name", named.__name__))
        """Name that the model knows."""
        if not _NAME.fullmatch(self.name):
            raise RewardError(f"is named {self.name!r}, expected a function with a name of letters, digits and _")
        self.schema = self._schema()
        """JSON schema, as chat templates get it."""
        parameters = self.schema["function"]["parameters"]
        self._validator = jsonschema.Draft202012Validator(_with_null({**parameters, "additionalProperties": False}))

    def _schema(self) -> dict[str, Any]:
        try:
            with quick_imports():  # it imports torch for the first schema
                from transformers.utils.chat_template_utils import get_json_schema

                schema = get_json_schema(self._routine)
            json.dumps(schema)
        except Exception as error:  # it parses docstrings and type hints of any kind
            raise RewardError(
                f"has no schema: {' '.join(str(error).split())[:300]}; expected a type hint for each parameter, and a "
                'docstring with a line for each under "Args:"'
            ) from None
        function = {name: value for name, value in schema["function"].items() if name != "return"}
        function["parameters"].get("properties", {}).pop("self", None)
        return {"type": "function", "function": function | {"name": self.name}}

    def arguments(self, text: str) -> dict[str, Any]:
        """Read the arguments of a call. Raises ArgumentsError for what does not fit the schema."""
        try:
            arguments = json.loads(text)
            json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ArgumentsError("arguments have a lone surrogate, which is not UTF-8") from None
        except (ValueError, RecursionError) as error:
            raise ArgumentsError(f"arguments are not JSON: {error}") from None
        problem = jsonschema.exceptions.best_match(self._validator.iter_errors(arguments))
        if problem is not None:
            where = "".join(f" {key}" for key in problem.absolute_path)
            raise ArgumentsError(f"argument{where}: {problem.message[:300]}" if where else problem.message[:300])
        assert isinstance(arguments, dict)
        return arguments

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Call the function, in a thread of its own unless it is async. Returns its result as text.

        Raises:
            NonsenseError: the result is no text and not in JSON.
            Exception: whatever the function raises.
        """
        if inspect.iscoroutinefunction(self._routine):
            result = await self._function(**arguments)
        else:
            result = await in_thread(self._function, **arguments)
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise NonsenseError(
                f"tool {self.name} returned a {type(result).__name__}, expected a text or what JSON has"
            ) from None


def _with_null(schema: Any) -> Any:
    """A schema whose nullable values may be null: `nullable` is OpenAPI's word, which JSON Schema does not know."""
    if isinstance(schema, list):
        return [_with_null(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    known = {
        name: _with_null(value) for name, value in schema.items() if name != "nullable" or not isinstance(value, bool)
    }
    return {"anyOf": [known, {"type": "null"}]} if schema.get("nullable") is True else known


class _Threads:
    """Count of threads that nobody waits for any more."""

    def __init__(self) -> None:
        self.abandoned = 0

    def abandon(self) -> None:
        """Count one more. Too many end the process, since nothing else ends a thread."""
        self.abandoned += 1
        if self.abandoned > _MOST_ABANDONED:
            print(f"{self.abandoned} calls of tools have not returned after their limit", file=sys.stderr, flush=True)
            os._exit(1)


_THREADS = _Threads()


async def in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function in a thread of its own, which is left to itself if the caller is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    returned = False

    def call() -> None:
        try:
            result, error = function(*arguments, **named), None
        except BaseException as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(done, result, error)

    def done(result: Any, error: BaseException | None) -> None:
        nonlocal returned
        returned = True
        if future.cancelled():
            _THREADS.abandoned -= 1
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        elif error is not None:
            future.set_exception(ToolFailureError(f"raised {describe(error)}"))
        else:
            future.set_result(result)

    threading.Thread(target=call, daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        if not returned:
            _THREADS.abandon()
        raise
