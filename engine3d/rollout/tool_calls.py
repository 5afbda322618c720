"""Tool calls in generated text, which SGLang's parsers read in the format of a model family."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_LONGEST_SEARCH_S = 10.0
_FLAGS = re.DOTALL | re.MULTILINE | re.IGNORECASE | re.VERBOSE


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Args:
        name: of the tool, which may be none that there is.
        arguments: JSON text, usually of an object.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CallsOfText:
    """Calls in a text.

    Args:
        content: the text without its calls.
        calls: in their order.
        malformed: True if the text has a call, and none can be read.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: bool = False


def find_parser(name: str | None, template: str | None, tokenizer: PreTrainedTokenizerBase, setting: str) -> str:
    """The name of a parser.

    Args:
        name: given; that of the template's family, as SGLang knows it, if None.
        template: chat template.
        tokenizer: of the model.
        setting: that gives the name, for errors.

    Raises:
        UserError: SGLang has no such parser, or knows none for this template.
    """
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    names = sorted(FunctionCallParser.ToolCallParserEnum)
    if name is None:
        from sglang.srt.parser.template_detection import detect_tool_call_parser

        name = detect_tool_call_parser(template, tokenizer)
        if name not in names:
            raise UserError(
                f"{setting} is not set, and SGLang knows no parser for this chat template; expected one of "
                f"{', '.join(names)}"
            )
    if name not in names:
        raise UserError(f"{setting}={name}: SGLang has no such parser; expected one of {', '.join(names)}")
    return name


class ToolCallReader:
    """Reads calls in texts.

    Args:
        parser: name of SGLang's.
        tools: JSON schemas of functions, as chat templates get them.
        tokenizer: of the model, which some parsers need.
    """

    def __init__(
        self, parser: str, tools: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        from sglang.srt.entrypoints.openai.protocol import Tool

        self._parser, self._tokenizer = parser, tokenizer
        self._tools = [Tool.model_validate(tool) for tool in tools]
        # They log what a model has written wrongly, with a traceback for each text.
        logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)

    def read(self, text: str) -> CallsOfText:
        """Read the calls of a text, which has special tokens where the family's format has some."""
        from sglang.srt.environ import envs
        from sglang.srt.function_call.function_call_parser import FunctionCallParser

        parser = FunctionCallParser(self._tools, self._parser, self._tokenizer)  # its detector has state
        _bound_searches(parser.detector)
        with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):  # which an exception that leaves the block would keep
            try:
                begins = parser.has_tool_call(text)
                content, items = parser.parse_non_stream(text)
            except Exception:  # a detector may raise anything for what a model writes
                return CallsOfText(text, malformed=True)
        calls = tuple(ToolCall(str(item.name or ""), item.parameters or "{}") for item in items)
        return CallsOfText(content, calls, malformed=begins and not calls)


def _bound_searches(detector: object) -> None:
    """Replace the patterns of a detector by equal ones whose search ends.

    Those of the standard library backtrack: pythonic's takes seconds for a call with 18 commas in a text, and twice as
    long for each further one.
    """
    for name, value in vars(detector).items():
        if isinstance(value, re.Pattern):
            setattr(detector, name, _BoundedPattern(value))


class _BoundedPattern:
    """A pattern whose searches raise TimeoutError after `_LONGEST_SEARCH_S`."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        import regex

        self._pattern = regex.compile(pattern.pattern, int(pattern.flags & _FLAGS))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(self._pattern, name), timeout=_LONGEST_SEARCH_S)
