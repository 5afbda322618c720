"""Requests of OpenAI's endpoints, checked by SGLang's own classes of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine3d.startup.imports import quick_imports

if TYPE_CHECKING:
    from pydantic import BaseModel

_READ = frozenset(
    {
        *("messages", "prompt", "model", "tools", "tool_choice", "stream", "stream_options"),
        *("max_tokens", "max_completion_tokens"),
    }
)
"""Options that have an effect."""
_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
"""Options that change no token."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


class BadRequestError(ValueError):
    """A request that is not served.

    Args:
        message: one line.
        param: name of the option that is wrong, if it is one.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ServedSampling:
    """Distribution that the policy is sampled from, which a request may repeat and not change.

    Args:
        values: of options, by name, such as temperature.
        ignored: names of options that have no effect.
    """

    values: Mapping[str, float]
    ignored: Collection[str] = ()


@dataclass(frozen=True)
class CompletionOrder:
    """A request that is served.

    Args:
        model: name that the request gave.
        max_tokens: most tokens of the answer, if the request bounds them.
        stream: True for an answer in events.
        with_usage: True if the last event is to have the numbers of tokens.
        messages: of the conversation; none of a text completion.
        tools: JSON schemas of functions that the model may call.
        prompt: text or token ids of a text completion.
    """

    model: str
    max_tokens: int | None
    stream: bool
    with_usage: bool
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    prompt: str | Sequence[int] = ""


def load_protocol() -> None:
    """Import SGLang's classes, which takes seconds."""
    with quick_imports():
        import sglang.srt.entrypoints.openai.protocol as protocol

    assert protocol.ChatCompletionRequest


def chat_order(body: Mapping[str, Any], sampling: ServedSampling) -> CompletionOrder:
    """Check a request of `/v1/chat/completions`.

    Raises:
        BadRequestError: it is none, or has an option that would change how tokens are drawn.
    """
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    body = _given(body, sampling)
    checked = _checked(ChatCompletionRequest, body, sampling)
    choice = checked.tool_choice
    if choice not in ("auto", "none"):
        raise BadRequestError(
            "tool_choice forces a call, by which tokens would be drawn from another distribution; expected auto or "
            "none",
            "tool_choice",
        )
    most = body.get("max_completion_tokens")
    tools = body.get("tools") or () if choice == "auto" else ()
    return CompletionOrder(
        str(body.get("model", "policy")),
        _positive(body.get("max_tokens") if most is None else most),
        bool(checked.stream),
        _with_usage(checked),
        messages=list(body["messages"]),
        tools=list(tools),
    )


def text_order(body: Mapping[str, Any], sampling: ServedSampling) -> CompletionOrder:
    """Check a request of `/v1/completions`. Raises as `chat_order`."""
    from sglang.srt.entrypoints.openai.protocol import CompletionRequest

    body = _given(body, sampling)
    checked = _checked(CompletionRequest, body, sampling)
    prompt = checked.prompt
    if not prompt or not (isinstance(prompt, str) or isinstance(prompt[0], int)):
        raise BadRequestError("prompt: several or none, expected one text, or one list of token ids", "prompt")
    # OpenAI's default is 16.
    most = _positive(checked.max_tokens)
    name = str(body.get("model", "policy"))
    return CompletionOrder(name, most, bool(checked.stream), _with_usage(checked), prompt=prompt)


def _with_usage(checked: Any) -> bool:
    return checked.stream_options is not None and bool(checked.stream_options.include_usage)


def _positive(most: Any) -> int | None:
    if most is None:
        return None
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadRequestError(f"max_tokens: {most!r:.40}, expected at least 1", "max_tokens")
    return most


def _given(body: Mapping[str, Any], sampling: ServedSampling) -> Mapping[str, Any]:
    """The options of a request without those that are null or ignored."""
    return {name: value for name, value in body.items() if value is not None and name not in sampling.ignored}


def _checked(kind: type[BaseModel], given: Mapping[str, Any], sampling: ServedSampling) -> Any:
    """The request as SGLang reads it."""
    try:
        checked = kind.model_validate({**given})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise BadRequestError(
            " ".join(f"{name}: {first['msg']}".split()), str(first["loc"][0]) if name else None
        ) from None
    for name, value in given.items():
        if name in _READ or name in _WITHOUT_EFFECT:
            continue
        if name in _SAMPLING:
            if value != sampling.values.get(name, value):
                raise BadRequestError(
                    f"{name}: {value!r:.40}, and the policy is sampled with {sampling.values[name]}; leave it out, or "
                    "name it in environment.ignored_options",
                    name,
                )
            continue
        field = kind.model_fields.get(name)
        if field is None or value != field.default:
            raise BadRequestError(
                f"{name} is not supported; leave it out, or name it in environment.ignored_options", name
            )
    return checked
