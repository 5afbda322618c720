"""Messages as text by a chat template, and which of the text the assistant wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import jinja2.meta
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError, shortened
from engine3d.input_files import FileError, read_text
from hybridflow.data.files.config import ChatConfig, Learned
from hybridflow.data.tokenizer import encode_text

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]

_OF_TRANSFORMERS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner"),
    }
)
"""Names that a template reads which are no arguments of a recipe."""
_MOST_TEMPLATE_BYTES = 1 << 20
_PROBE = "e7d1b04c"
"""A text that no template has by itself."""


class _NoDateError(Exception):
    """The template asks for a date, and none is set."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: of all messages.
        learned: where the text is that the assistant wrote and is to write: (begin, end) in characters.
    """

    text: str
    learned: tuple[tuple[int, int], ...] = ()


class ChatTemplate:
    """The chat template of a recipe and its tokenizer.

    Args:
        config: of the recipe.
        tokenizer: of the model.
        name: of these settings in the recipe.

    Raises:
        UserError: a file is no template, an argument is not read by it, or it does not render the system prompt.
    """

    def __init__(self, config: ChatConfig, tokenizer: PreTrainedTokenizerBase, name: str = "data.files.chat") -> None:
        self.config, self._tokenizer, self._name = config, tokenizer, name
        self.source = self._source()
        """Text of the template; None where the tokenizer has none."""
        if self.source is None:
            if given := [name for name in ("system", "arguments", "date") if getattr(config, name)]:
                raise UserError(f"{self._name}.{given[0]} is set and {self._no_template()}")
            if config.texts == "user":
                raise UserError(f"{self._name}.texts=user, and {self._no_template()}")
            return
        self._check_arguments(self.source)
        if config.system is not None:
            self._check_system()

    def _source(self) -> str | None:
        if self.config.template is not None:
            try:
                return read_text(self.config.template, _MOST_TEMPLATE_BYTES)
            except FileError as error:
                raise UserError(f"{self._name}.template: {error}") from None
        found = self._tokenizer.chat_template
        if isinstance(found, Mapping):  # some have several, by name
            found = found.get("default")
        return found if isinstance(found, str) and found else None

    def _no_template(self) -> str:
        return f"the tokenizer has no chat template; expected {self._name}.template, the file of one"

    def _check_arguments(self, source: str) -> None:
        try:
            environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
            read = jinja2.meta.find_undeclared_variables(environment.parse(_without_generation(source)))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template, line {error.lineno}: {error.message}") from None
        if self.config.date is not None and "strftime_now" not in read:
            raise UserError(f"{self._name}.date is set, and the chat template does not ask for a date; expected none")
        special = set(self._tokenizer.special_tokens_map)
        known = sorted(read - _OF_TRANSFORMERS - special)
        for name in self.config.arguments:
            if name not in known:
                raise UserError(
                    f"{self._name}.arguments: the chat template does not read {name!r}; expected "
                    + (f"one of {', '.join(known)}" if known else "none, since it has no arguments")
                )

    def _check_system(self) -> None:
        probe = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "x"}]
        if _PROBE not in self._render(probe, f"{self._name}.system", generation_prompt=False):
            raise UserError(
                f"{self._name}.system is set, and the chat template does not render the content of a system message"
            )
        assert self.config.system is not None
        encode_text(self._tokenizer, self.config.system, f"{self._name}.system")

    def prompt(self, messages: Any, place: str) -> str:
        """The text of a prompt.

        Raises:
            UserError: these are no messages, or the last is not one that the assistant answers.
        """
        checked = self._checked(messages, place)
        if self.config.generation_prompt and checked[-1]["role"] == "assistant":
            raise UserError(
                f"{place}: the last message is the assistant's, expected one that it answers; or "
                f"{self._name}.generation_prompt=false"
            )
        return self._render(checked, place, generation_prompt=self.config.generation_prompt)

    def of_text(self, text: str, place: str) -> str:
        """The text of a prompt that is one message of the user."""
        return self.prompt([{"role": "user", "content": text}], place)

    def conversation(self, messages: Any, place: str, learn: Learned | None = None) -> Rendered:
        """A supervised conversation, and what of it is learned.

        What the assistant wrote begins where the text with the template's generation prompt ends, so that the model
        learns exactly what it is to write where it generates: with the end of its turn, without the header.

        Args:
            messages: of which some are the assistant's.
            place: of it in errors.
            learn: which of these; as the recipe says if None.

        Raises:
            UserError: there is no message of the assistant, or the template renders a message otherwise when others
                follow, so that what was learned would not be what is generated.
        """
        checked = self._checked(messages, place)
        own = [number for number, message in enumerate(checked) if message["role"] == "assistant"]
        if not own or own[0] == 0:
            raise UserError(f"{place}: no message of the assistant after another, expected one to learn")
        if (learn or self.config.learn) == "last":
            own = own[-1:]
        text = self._render(checked, place, generation_prompt=False)
        spans = []
        for number in own:
            before = self._render(checked[:number], place, generation_prompt=self.config.generation_prompt)
            after = self._render(checked[: number + 1], place, generation_prompt=False)
            if not text.startswith(before) or not text.startswith(after):
                raise UserError(
                    f"{place}: the chat template renders the beginning of the conversation otherwise once message "
                    f"{number + 1} follows, so that what would be learned is not what is generated; expected "
                    f"{self._name}.learn=last, a template that renders every message by itself, or {self._name}."
                    "arguments by which it does"
                )
            spans.append((len(before), len(after)))
        last = spans[-1][1]
        return Rendered(text[:last], tuple(spans))

    def _checked(self, messages: Any, place: str) -> list[Message]:
        """Messages without what is null, the recipe's system prompt before those that have none."""
        if self.source is None:
            raise UserError(f"{place}: the prompt is a list of messages, and {self._no_template()}")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise UserError(f"{place}: {shortened(repr(messages), 60)}, expected a list of messages")
        checked: list[Message] = []
        for number, message in enumerate(messages):
            where = f"{place}: message {number + 1}"
            if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
                raise UserError(f"{where} is {shortened(repr(message), 60)}, expected an object with role and content")
            if role not in ROLES:
                raise UserError(f"{where} has role {shortened(role, 40)!r}, expected one of {', '.join(ROLES)}")
            # Columns of Parquet have null for what a message lacks, and templates ask whether there is something.
            given = {name: value for name, value in message.items() if value is not None}
            content = given.get("content")
            if isinstance(content, list):
                given["content"] = content = joined(content, where)
            if not isinstance(content, str) and not (content is None and "tool_calls" in given):
                raise UserError(f"{where} has content {shortened(repr(content), 60)}, expected a text")
            checked.append(given)
        if self.config.system is not None and checked[0]["role"] not in ("system", "developer"):
            checked.insert(0, {"role": "system", "content": self.config.system})
        return checked

    def _render(self, messages: Sequence[Message], place: str, *, generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                strftime_now=self._date,
                **self.config.arguments,
            )
        except _NoDateError:
            raise UserError(
                f"{place}: the chat template writes today's date, with which prompts are others every day; expected "
                f"{self._name}.date, such as 2026-01-31, for every day"
            ) from None
        except Exception as error:  # a template raises what it likes
            reason = shortened(" ".join(str(error).split()), 200)
            raise UserError(f"{place}: the chat template refuses these messages: {reason}") from None
        assert isinstance(text, str)
        return text

    def _date(self, format: str) -> str:
        """In place of the `strftime_now` of transformers."""
        if self.config.date is None:
            raise _NoDateError
        return self.config.date.strftime(format)


def joined(parts: list[Any], where: str) -> str:
    """The text of a content that is a list of parts. Raises UserError for a part that is no text."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UserError(f"{where} has a part of type {kind!r}, expected texts alone")
        texts.append(part["text"])
    return "".join(texts)


def _without_generation(source: str) -> str:
    """A template without the tags of transformers that mark what the assistant writes; jinja does not know them."""
    for tag in ("generation", "endgeneration"):
        for left in ("{%-", "{%"):
            for right in ("-%}", "%}"):
                source = source.replace(f"{left} {tag} {right}", "")
    return source
