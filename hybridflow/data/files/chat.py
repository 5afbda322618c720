"""Messages as text by a chat template, and which of the text the assistant wrote."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from engine3d.errors import UserError, shortened
from engine3d.input_files import FileError, read_text
from hybridflow.data.files.completeness import MARKER, Form, Probe, forms_of, shape_of
from hybridflow.data.files.config import ChatConfig, Learned
from hybridflow.data.files.messages import Message, Tools, read_messages
from hybridflow.data.tokenizer import encode_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OF_TRANSFORMERS = frozenset(
    {
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "range", "dict", "namespace", "lipsum", "cycler", "joiner"),
    }
)
"""Names that a template reads which are no arguments of a recipe."""
_MOST_TEMPLATE_BYTES = 1 << 20
_MOST_FORMS = 10_000
"""Shapes of messages of which the form is kept."""


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
        found = self._tokenizer.chat_template
        if isinstance(found, Mapping):  # some have several, by name
            texts = found.get("default"), found.get("tool_use", found.get("default"))
        else:
            texts = found, found
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

    def prompt(self, messages: Any, place: str, tools: Tools | None = None) -> str:
        """The text of a prompt.

        Args:
            messages: of the prompt.
            place: of it in errors.
            tools: that the assistant may call; those of the recipe if None.

        Raises:
            UserError: these are no messages, the last is not one that the assistant answers, or the template leaves out
                one of them.
        """
        checked = self._checked(messages, place)
        if self.config.generation_prompt and checked[-1]["role"] == "assistant":
            raise UserError(
                f"{place}: the last message is the assistant's, expected one that it answers; or "
                f"{self._name}.generation_prompt=false"
            )
        return self._complete(checked, place, tools, generation_prompt=self.config.generation_prompt)[1]

    def of_text(self, text: str, place: str) -> str:
        """The text of a prompt that is one message of the user."""
        return self.prompt([{"role": "user", "content": text}], place)

    def conversation(
        self, messages: Any, place: str, learn: Learned | None = None, tools: Tools | None = None
    ) -> Rendered:
        """A supervised conversation, and what of it is learned.

        What the assistant wrote begins where the text with the template's generation prompt ends, so that the model
        learns exactly what it is to write where it generates: with the end of its turn, without the header.

        Args:
            messages: of which some are the assistant's. Those of weight 0 are not trained on.
            place: of it in errors.
            learn: which of these; as the recipe says if None.
            tools: that the assistant may call; those of the recipe if None.

        Raises:
            UserError: there is no message of the assistant to train on, the template leaves out a message, or it
                renders one otherwise when others follow, so that what was learned would not be what is generated.
        """
        checked = self._checked(messages, place)
        own = _trained_on(checked, place)
        if (learn or self.config.learn) == "last":
            own = own[-1:]
        complete, text = self._complete(checked, place, tools, generation_prompt=False)
        spans = []
        for number in own:
            before = self._render(complete[:number], place, tools, generation_prompt=self.config.generation_prompt)
            after = self._render(complete[: number + 1], place, tools, generation_prompt=False)
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

    def _checked(self, messages: Any, place: str) -> list[dict[str, Any]]:
        """Messages, the recipe's system prompt before those that have none."""
        if self.source is None:
            raise UserError(f"{place}: the prompt is a list of messages, and {self._no_template()}")
        checked = read_messages(messages, place)
        if self.config.system is not None and checked[0]["role"] not in ("system", "developer"):
            checked.insert(0, {"role": "system", "content": self.config.system})
        return checked

    def _complete(
        self, messages: Sequence[Message], place: str, tools: Tools | None, *, generation_prompt: bool
    ) -> tuple[list[dict[str, Any]], str]:
        """Messages in the form that the template renders completely, and their text."""
        shape = generation_prompt, shape_of(messages, self._tools(tools))
        if (form := self._forms.get(shape)) is None:
            form = self._form(messages, place, self._tools(tools), generation_prompt=generation_prompt)
            if len(self._forms) < _MOST_FORMS:
                self._forms[shape] = form
        complete = form.applied(messages)
        return complete, self._render(complete, place, tools, generation_prompt=generation_prompt)

    def _form(self, messages: Sequence[Message], place: str, tools: Tools, *, generation_prompt: bool) -> Form:
        forms, complete, missing = forms_of(messages), list[tuple[int, Form]](), list[str]()
        for form in forms:
            probe = Probe(form.applied(messages), tools)
            try:
                text = self._render(probe.messages, place, probe.tools, generation_prompt=generation_prompt)
            except UserError:
                continue
            if (what := probe.missing(text)) is None:
                complete.append((text.count("None"), form))  # a null that is printed is one more
            else:
                missing.append(what)
        if complete:
            return min(complete, key=lambda each: each[0])[1]
        if missing:
            raise UserError(
                f"{place}: the chat template leaves out {missing[0]}; expected a template that renders it, or rows "
                "without it"
            )
        return forms[0]  # of which the template says itself what is wrong

    def _tools(self, tools: Tools | None) -> Tools:
        return self.config.tools if tools is None else tools

    def _render(
        self, messages: Sequence[Message], place: str, tools: Tools | None = None, *, generation_prompt: bool
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


def _trained_on(messages: Sequence[Message], place: str) -> list[int]:
    """Indices of the assistant's messages whose weight is not 0."""
    own = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not own or own[0] == 0:
        raise UserError(f"{place}: no message of the assistant after another, expected one to learn")
    others = (index for index, message in enumerate(messages) if index not in own and message.get("weight"))
    if (other := next(others, None)) is not None:
        raise UserError(
            f"{place}: message {other + 1} has a weight and role {messages[other]['role']}, expected it of messages of "
            "the assistant, which alone are trained on"
        )
    own = [index for index in own if messages[index].get("weight", 1)]
    if not own:
        raise UserError(f"{place}: all messages of the assistant have weight 0, expected one to train on")
    return own


def _without_generation(source: str) -> str:
    """A template without the tags of transformers that mark what the assistant writes; jinja does not know them."""
    for tag in ("generation", "endgeneration"):
        for left in ("{%-", "{%"):
            for right in ("-%}", "%}"):
                source = source.replace(f"{left} {tag} {right}", "")
    return source
