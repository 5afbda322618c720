"""Functions as tools: schemas, arguments that a model wrote, and results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hybridflow.environments.call_server import NonsenseError
from hybridflow.environments.tools.functions import ArgumentsError, Tool, ToolFailureError
from hybridflow.rewards.processes.function_process import RewardError


def add(left: int, right: int = 1, *, names: list[str] | None = None) -> int:
    """Add two numbers.

    Args:
        left: The first.
        right: The second.
        names: Of both.
    """
    del names
    return left + right


class Greeting:
    """Made with a word that the model does not see."""

    name = "greet"

    def __init__(self, word: str) -> None:
        self._word = word

    async def __call__(self, whom: str) -> str:
        """Greet somebody.

        Args:
            whom: Their name.
        """
        return f"{self._word} {whom}"


def test_a_function_has_the_schema_of_its_signature_and_docstring() -> None:
    schema = Tool(add).schema["function"]
    assert (schema["name"], schema["description"]) == ("add", "Add two numbers.")
    properties = schema["parameters"]["properties"]
    assert properties["left"] == {"type": "integer", "description": "The first."}
    assert schema["parameters"]["required"] == ["left"] and set(properties) == {"left", "right", "names"}
    assert "return" not in schema


def test_the_instance_of_a_class_is_called_by_its_name() -> None:
    tool = Tool(Greeting("hello"))
    assert tool.schema["function"]["name"] == "greet"
    assert set(tool.schema["function"]["parameters"]["properties"]) == {"whom"}
    assert asyncio.run(tool(tool.arguments('{"whom": "you"}'))) == "hello you"


def _without_docstring(left: int) -> int:
    return left


def _without_hint(left) -> int:  # type: ignore[no-untyped-def]
    """Give back.

    Args:
        left: A number.
    """
    return int(left)


@pytest.mark.parametrize("function", [_without_docstring, _without_hint])
def test_a_function_without_a_schema_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RewardError, match=r"has no schema: .*expected a type hint for each parameter"):
        Tool(function)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{left: 1}", "arguments are not JSON"),
        ('"left"', "is not of type 'object'"),
        ("{}", "'left' is a required property"),
        ('{"left": "1"}', "argument left: '1' is not of type 'integer'"),
        ('{"left": 1, "other": 2}', "'other' was unexpected"),
        ("[" * 100_000, "arguments are not JSON"),
        ('{"left": NaN}', "arguments are not JSON"),
        ('{"left": 1e999}', "arguments are not JSON"),
        ('{"left": 1, "names": ["\\ud800"]}', "lone surrogate"),
    ],
)
def test_arguments_that_do_not_fit(text: str, reason: str) -> None:
    with pytest.raises(ArgumentsError, match=reason):
        Tool(add).arguments(text)


def test_what_may_be_null_in_the_schema_may_be_null_in_a_call() -> None:
    def look(query: str, year: int | None = None) -> str:
        """Look something up.

        Args:
            query: What.
            year: When.
        """
        return f"{query} {year}"

    tool = Tool(look)
    assert asyncio.run(tool(tool.arguments('{"query": "a", "year": null}'))) == "a None"
    with pytest.raises(ArgumentsError, match="argument year: 'x' is not"):
        tool.arguments('{"query": "a", "year": "x"}')


def test_results_are_text_or_json() -> None:
    tool = Tool(add)
    assert asyncio.run(tool(tool.arguments('{"left": 41}'))) == "42"

    def nothing() -> object:
        """Return what JSON has not."""
        return object()

    with pytest.raises(NonsenseError, match="tool nothing returned a object, expected a text or what JSON has"):
        asyncio.run(Tool(nothing)({}))


def test_a_call_that_is_given_up_keeps_no_other_from_running() -> None:
    ends = threading.Event()

    def wait() -> str:
        """Wait."""
        ends.wait(60)
        return "late"

    async def both() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Tool(wait)({}), 0.05)
        return int(await Tool(add)({"left": 1}))

    assert asyncio.run(both()) == 2
    ends.set()


def test_a_tool_that_exits_is_a_failure() -> None:
    def leave() -> str:
        """Leave."""
        raise SystemExit(0)

    with pytest.raises(ToolFailureError, match="raised SystemExit"):
        asyncio.run(Tool(leave)({}))
