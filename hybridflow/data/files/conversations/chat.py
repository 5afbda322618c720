"""Messages as text by a chat template, with the spans that the assistant wrote."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from engine3d.errors import UserError, shortened
from engine3d.input_files import FileError, read_text
from hybridflow.data.files.completeness import MARKER, Form, TemplateProbe, forms_of, shape_of
from hybridflow.data.files.config import ChatConfig, TrainedOn
from hybridflow.data.files.conversations.messages import Message, Tools, read_messages
from hybridflow.data.tokenizer import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_TRANSFORMERS = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner"),
    }
)
"""Names read by templates that are no arguments of a recipe."""
_MOST_TEMPLATE_BYTES = 1 << 20
_MOST_FORMS = 10_000
"""Largest number of shapes of messages whose form is kept."""


class _NoDateError(Exception):
    """The template asks for a date, and none is set."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Args:
        text: of all messages.
        trained_on: spans of the text that the assistant is trained to write: (begin, end) in characters.
    """

    text: str
    trained_on: tuple[tuple[int, int], ...] = ()


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
        self.source, self.tool_source = self._sources()
        """Text of the template, and of the one for messages with tools; None where the tokenizer has none."""
        self.reads_tools = False
        """True if the template reads tools."""
        self._forms: dict[Hashable, Form] = {}
        if self.source is None:
            if given := [name for name in ("system", "arguments", "date", "tools") if getattr(config, name)]:
                raise UserError(f"{self._name}.{given[0]} is set and {self._no_template()}")
            if config.texts == "user":
                raise UserError(f"{self._name}.texts=user, and {self._no_template()}")
            return
        names = self._names(self.source)
        self._check_arguments(names)
        self.reads_tools = "tools" in (names if self.tool_source == self.source else self._names(self.tool_source))
        if config.tools and not self.reads_tools:
            raise UserError(f"{self._name}.tools is set, and the chat template does not read tools; expected none")
        if config.system is not None:
            self._check_system()

    def _sources(self) -> tuple[str | None, str | None]:
        if self.config.template is not None:
            try:
                text = read_text(self.config.template, _MOST_TEMPLATE_BYTES)
            except FileError as error:
                raise UserError(f"{self._name}.template: {error}") from None
            return text, text
        templates = self._tokenizer.chat_template
        if isinstance(templates, Mapping):  # some have several, by name
            texts = templates.get("default"), templates.get("tool_use", templates.get("default"))
        else:
            texts = templates, templates
        source, tool_source = (text if isinstance(text, str) and text else None for text in texts)
        return source, tool_source

    def _no_template(self) -> str:
        return f"the tokenizer has no chat template; expected {self._name}.template, the file of one"

    def _names(self, source: str | None) -> set[str]:
        """The names that a template reads."""
        if source is None:
            return set()
        try:
            environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
            return jinja2.meta.find_undeclared_variables(environment.parse(_without_generation(source)))
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the chat template, line {error.lineno}: {error.message}") from None

    def _check_arguments(self, read: set[str]) -> None:
        if self.config.date is not None and "strftime_now" not in read:
            raise UserError(f"{self._name}.date is set, and the chat template does not ask for a date; expected none")
        if "tools" in self.config.arguments:
            raise UserError(
                f"{self._name}.arguments: tools have settings of their own; expected {self._name}.tools, a list of "
                f"them, or the column of each row's tools as {self._tools_column}"
            )
        special = set(self._tokenizer.special_tokens_map)
        known = sorted(read - _OF_TRANSFORMERS - special)
        for name in self.config.arguments:
            if name not in known:
                what = "sets itself" if name in read else "does not read"
                raise UserError(
                    f"{self._name}.arguments: the chat template {what} {name!r}; expected "
                    + (f"one of {', '.join(known)}" if known else "none, since it has no arguments")
                )

    @property
    def _tools_column(self) -> str:
        return "data.pairs.tools_field" if self._name.startswith("data.pairs") else "`tools` of a source"

    def _check_system(self) -> None:
        probe = [{"role": "system", "content": MARKER}, {"role": "user", "content": "x"}]
        if MARKER not in self._render(probe, f"{self._name}.system", generation_prompt=False):
            raise UserError(
                f"{self._name}.system is set, and the chat template does not render the content of a system message"
            )
        assert self.config.system is not None
        encode_text(self._tokenizer, self.config.system, f"{self._name}.system")

    def prompt(self, messages: Any, location: str, tools: Tools | None = None) -> str:
        """The text of a prompt.

        Args:
            messages: of the prompt.
            location: of it in errors.
            tools: that the assistant may call; those of the recipe if None.

        Raises:
            UserError: these are no messages, the last is not one that the assistant answers, or the template leaves out
                one of them.
        """
        checked = self._checked(messages, location)
        if self.config.generation_prompt and checked[-1]["role"] == "assistant":
            raise UserError(
                f"{location}: the last message is the assistant's, expected one that it answers; or "
                f"{self._name}.generation_prompt=false"
            )
        return self._complete(checked, location, tools, generation_prompt=self.config.generation_prompt)[1]

    def of_text(self, text: str, location: str) -> str:
        """The text of a prompt that is one message of the user."""
        return self.prompt([{"role": "user", "content": text}], location)

    def after_turn(self, messages: Sequence[Message], location: str) -> str:
        """Render what follows a turn of the assistant: the end of its message, these messages, and its next header.

        Raises:
            UserError: the template does not render the turn, or one of the messages, exactly once.
        """
        before: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARKER}]
        text = self._render([*before, *messages], location, generation_prompt=True)
        contents = [str(message["content"]).strip() for message in messages]
        if text.count(MARKER) != 1 or not all(content in text for content in contents):
            raise UserError(f"{location}: the chat template leaves out a message of role {messages[-1]['role']}")
        return text.partition(MARKER)[2]

    def after_calls(self, names: Sequence[str], answers: Sequence[str], location: str) -> str:
        """Render what follows a turn of the assistant with calls: the end of its message, answers, and its next header.

        Args:
            names: of the tools that were called, in their order.
            answers: of these.
            location: of them in errors.

        Raises:
            UserError: the template does not render calls or answers, or ends a message with calls in another way.
        """
        user: Message = {"role": "user", "content": "x"}
        calls = [call_of(number, name, {"x": MARKER}) for number, name in enumerate(names)]
        messages = [
            user,
            {"role": "assistant", "content": "", "tool_calls": calls},
            *map(answer_to, calls, answers),
        ]
        complete, text = self._complete(messages, location, None, generation_prompt=True)
        before = self._render(complete[:2], location, generation_prompt=False)
        end = self._render([user, {"role": "assistant", "content": MARKER}], location, generation_prompt=False)
        before, end = before.rpartition(MARKER)[2], end.rpartition(MARKER)[2]
        text = text.split(MARKER, len(names))[-1]
        if not text.startswith(before) or not before.endswith(end):
            raise UserError(
                f"{location}: the chat template ends a message with calls in another way than one without, or renders "
                "it differently once answers follow; that was not tried"
            )
        return end + text[len(before) :]

    def text_of(self, messages: Sequence[Message], location: str, *, generation_prompt: bool) -> str:
        """Render messages. Raises UserError if the template refuses them, or leaves out one of them."""
        return self._complete(messages, location, None, generation_prompt=generation_prompt)[1]

    def conversation(
        self, messages: Any, location: str, train_on: TrainedOn | None = None, tools: Tools | None = None
    ) -> Rendered:
        """Render a supervised conversation, with the spans to train on.

        A span of the assistant begins where the text with the template's generation prompt ends. So the model is
        trained on exactly what it has to generate: with the end of its turn, without the header.

        Args:
            messages: of which some are the assistant's. Those of weight 0 are not trained on.
            location: of it in errors.
            train_on: "all" or "last" of these. The recipe's setting if None.
            tools: that the assistant may call; those of the recipe if None.

        Raises:
            UserError: there is no message of the assistant to train on, the template leaves out a message, or it
                renders one differently when others follow, so that the model would be trained on another text than it
                generates.
        """
        checked = self._checked(messages, location)
        trained = _trained_on(checked, location)
        if (train_on or self.config.train_on) == "last":
            trained = trained[-1:]
        complete, text = self._complete(checked, location, tools, generation_prompt=False)
        spans = []
        for number in trained:
            before = self._render(complete[:number], location, tools, generation_prompt=self.config.generation_prompt)
            after = self._render(complete[: number + 1], location, tools, generation_prompt=False)
            if not text.startswith(before) or not text.startswith(after):
                raise UserError(
                    f"{location}: the chat template renders the beginning of the conversation differently once message "
                    f"{number + 1} follows, so that the text to train on is not the text that is generated; expected "
                    f"{self._name}.train_on=last, a template that renders every message by itself, or {self._name}."
                    "arguments by which it does"
                )
            spans.append((len(before), len(after)))
        last = spans[-1][1]
        return Rendered(text[:last], tuple(spans))

    def _checked(self, messages: Any, location: str) -> list[dict[str, Any]]:
        """Messages, the recipe's system prompt before those that have none."""
        if self.source is None:
            raise UserError(f"{location}: the prompt is a list of messages, and {self._no_template()}")
        checked = read_messages(messages, location)
        if self.config.system is not None and checked[0]["role"] not in ("system", "developer"):
            checked.insert(0, {"role": "system", "content": self.config.system})
        return checked

    def _complete(
        self, messages: Sequence[Message], location: str, tools: Tools | None, *, generation_prompt: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """Messages in the form that the template renders completely, and their text."""
        shape = generation_prompt, shape_of(messages, self._tools(tools))
        if (form := self._forms.get(shape)) is None:
            form = self._form(messages, location, self._tools(tools), generation_prompt=generation_prompt)
            if len(self._forms) < _MOST_FORMS:
                self._forms[shape] = form
        complete = form.applied(messages)
        return complete, self._render(complete, location, tools, generation_prompt=generation_prompt)

    def _form(self, messages: Sequence[Message], location: str, tools: Tools, *, generation_prompt: bool) -> Form:
        forms, complete, missing = forms_of(messages), list[tuple[int, Form]](), list[str]()
        for form in forms:
            probe = TemplateProbe(form.applied(messages), tools)
            try:
                text = self._render(probe.messages, location, probe.tools, generation_prompt=generation_prompt)
            except UserError:
                continue
            if (what := probe.missing(text)) is None:
                complete.append((text.count("None"), form))  # a null that is printed is one more
            else:
                missing.append(what)
        if complete:
            return min(complete, key=lambda candidate: candidate[0])[1]
        if missing:
            raise UserError(
                f"{location}: the chat template leaves out {missing[0]}; expected a template that renders it, or rows "
                "without it"
            )
        return forms[0]  # the template itself then raises the reason

    def _tools(self, tools: Tools | None) -> Tools:
        return self.config.tools if tools is None else tools

    def _render(
        self, messages: Sequence[Message], location: str, tools: Tools | None = None, *, generation_prompt: bool
    ) -> str:
        given = self._tools(tools)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in given] or None,
                chat_template=self.tool_source if given else self.source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                strftime_now=self._date,
                **self.config.arguments,
            )
        except _NoDateError:
            raise UserError(
                f"{location}: the chat template writes today's date, with which prompts differ every day; expected "
                f"{self._name}.date, such as 2026-01-31, for every day"
            ) from None
        except Exception as error:  # a template may raise anything
            reason = shortened(" ".join(str(error).split()), 200)
            raise UserError(f"{location}: the chat template refuses these messages: {reason}") from None
        assert isinstance(text, str)
        return text

    def _date(self, format: str) -> str:
        """Replacement of the `strftime_now` of transformers."""
        if self.config.date is None:
            raise _NoDateError
        return self.config.date.strftime(format)


def call_of(number: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call of a tool as a message of the assistant has it. `number`: of the call in the message."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def answer_to(call: Mapping[str, Any], answer: str) -> Message:
    """The message of a tool that answers a call."""
    return {"role": "tool", "content": answer, "name": call["function"]["name"], "tool_call_id": call["id"]}


def _trained_on(messages: Sequence[Message], location: str) -> list[int]:
    """Indices of the assistant's messages whose weight is not 0."""
    trained = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not trained or trained[0] == 0:
        raise UserError(f"{location}: no message of the assistant after another, expected one to train on")
    others = (index for index, message in enumerate(messages) if index not in trained and message.get("weight"))
    if (other := next(others, None)) is not None:
        raise UserError(
            f"{location}: message {other + 1} has a weight and role {messages[other]['role']}, expected it of "
            "messages of the assistant, which alone are trained on"
        )
    trained = [index for index in trained if messages[index].get("weight", 1)]
    if not trained:
        raise UserError(f"{location}: all messages of the assistant have weight 0, expected one to train on")
    return trained


def _without_generation(source: str) -> str:
    """A template without the tags of transformers that mark what the assistant writes; jinja does not know them."""
    for tag in ("generation", "endgeneration"):
        for left in ("{%-", "{%"):
            for right in ("-%}", "%}"):
                source = source.replace(f"{left} {tag} {right}", "")
    return source
