"""Prompts with two given responses each, as tokens, for training without engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from hybridflow.data.config import OverlongPolicy, SameResponses
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.cutting import Fit, cut_messages
from hybridflow.data.files.conversations.supervised import Encoder
from hybridflow.data.pairs import Pair, Text, is_messages
from hybridflow.data.prompts import Prompts
from hybridflow.data.remarks import RemarkCounts, Remarks, lines, located, of_prompt, of_response
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import cut, encode_continuation, encode_prompt, encode_text, ended, middle_cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class GivenResponses(Prompts):
    """Prompts of one phase with two responses to each.

    Args:
        responses: token ids: the better and the worse one of a pair; or of an unpaired example its response, and one to
            another prompt.
        rewards: of the two: 1 where a response is good, 0 where it is bad or to another prompt.
        alike: locations of pairs that were left out because both responses are the same.
        remarks: on the pairs.
    """

    responses: list[tuple[list[int], list[int]]]
    rewards: list[tuple[float, float]]
    alike: list[str] = field(default_factory=list)
    remarks: Remarks = field(default_factory=dict)


@dataclass(frozen=True)
class _Encoded:
    """A prompt with the responses to train on: one of an unpaired example."""

    example: Example
    prompt: list[int]
    responses: tuple[list[int], ...]
    good: bool
    location: str


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    *,
    context: int,
    policy: OverlongPolicy,
    same: SameResponses,
    unpaired: bool,
    chat: ChatConfig | None = None,
) -> GivenResponses:
    """Encode pairs.

    Args:
        tokenizer: of texts; a response that is one ends with its end-of-sequence token.
        pairs: of one phase.
        context: most tokens of a prompt and a response to it.
        policy: for prompts that leave no room for their longest response.
        same: for pairs of which both responses are the same tokens.
        unpaired: each response is an example of its own, paired with a response to another prompt: that of the next
            example with another prompt, cut where it does not fit.
        chat: how messages become text.

    Raises:
        UserError: naming the pair that cannot be encoded, does not fit, or has the same response twice.
    """
    template = ChatTemplate(chat or ChatConfig(), tokenizer, "data.pairs.chat")
    if not template.reads_tools and any(pair.tools for pair in pairs):
        raise UserError("data.pairs.tools_field is set, and the chat template does not read tools; expected null")
    kept: list[_Encoded] = []
    alike, overlong, remarks = [], 0, RemarkCounts()
    for number, pair in enumerate(pairs):
        prompt = _prompt(tokenizer, template, pair)
        chosen, rejected = (_response(tokenizer, template, pair, response) for response in (pair.chosen, pair.rejected))
        if chosen is not None and chosen == rejected:
            alike.append(_dropped_as_alike(pair, same))
            continue
        there = [response for response in (chosen, rejected) if response is not None]
        longest = max(map(len, there))
        capacity = context - longest
        if len(prompt) > max(capacity, 0):
            if policy == "refuse" or (capacity < 1 and policy != "drop"):
                raise UserError(
                    f"{pair.location}: the prompt has {len(prompt)} tokens and its longest response {longest}, "
                    f"expected at most {context} together"
                )
            overlong += 1
            if policy == "drop":
                continue
            prompt = _cut(tokenizer, template, pair, prompt, capacity, policy)
        remarks.add(number, _remarks(tokenizer, pair, prompt, there))
        text = pair.prompt if isinstance(pair.prompt, str) else str(tokenizer.decode(prompt))
        if unpaired:
            kept += _examples_of(pair, text, prompt, chosen, rejected)
        else:
            example = Example(text, [pair.chosen, pair.rejected])
            kept.append(_Encoded(example, prompt, tuple(there), True, pair.location))
    if not kept and alike:
        raise UserError(
            f"{alike[0]}: the better and the worse response are the same, as in all {len(alike):,} pairs; expected "
            "some that differ"
        )
    if unpaired:
        responses = [
            (encoded.responses[0], other[: context - len(encoded.prompt)])
            for encoded, other in zip(kept, _responses_to_others(kept), strict=True)
        ]
    else:
        responses = [(encoded.responses[0], encoded.responses[1]) for encoded in kept]
    return GivenResponses(
        [encoded.example for encoded in kept],
        [encoded.prompt for encoded in kept],
        overlong,
        responses=responses,
        rewards=[(1.0 if encoded.good else 0.0, 0.0) for encoded in kept],
        alike=alike,
        remarks=located(remarks.counts, lambda number: pairs[number].location),
    )


def _dropped_as_alike(pair: Pair, same: SameResponses) -> str:
    """Location of a pair whose responses are the same. Raises UserError where such pairs are refused."""
    if same == "refuse":
        raise UserError(
            f"{pair.location}: the better and the worse response are the same; expected two that differ, or "
            "data.pairs.same_responses=drop"
        )
    return pair.location


def _examples_of(
    pair: Pair, text: str, prompt: list[int], chosen: list[int] | None, rejected: list[int] | None
) -> Iterator[_Encoded]:
    """Each response of a pair as an example of its own."""
    for response, given, good in ((chosen, pair.chosen, True), (rejected, pair.rejected, False)):
        if response is not None:
            answer = {"response": given, "desirable": good}
            yield _Encoded(Example(text, answer), prompt, (response,), good, pair.location)


def _remarks(
    tokenizer: PreTrainedTokenizerBase, pair: Pair, prompt: Sequence[int], responses: Sequence[Sequence[int]]
) -> Iterator[str]:
    if pair.unread_tools:
        yield "tools"
    yield from of_prompt(tokenizer, prompt, is_text=isinstance(pair.prompt, str))
    yield from dict.fromkeys(
        kind for response in responses for kind in of_response(tokenizer, response, [True] * len(response))
    )


def pair_notes(phases: dict[str, Prompts], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for each phase of which pairs were left out because both responses are the same, and for each remark.

    Args:
        phases: by the name of their prompts.
        tokenizer: of their tokens.
    """
    given = {name: phase for name, phase in phases.items() if isinstance(phase, GivenResponses)}
    remarks = [line for name, phase in given.items() for line in lines(phase.remarks, tokenizer, f"{name} pairs")]
    return remarks + [
        f"data: {len(phase.alike):,} of {len(phase) + len(phase.alike):,} {name} pairs have the same response twice "
        f"and are left out; the first is {phase.alike[0]}"
        for name, phase in given.items()
        if phase.alike
    ]


def _responses_to_others(examples: Sequence[_Encoded]) -> list[list[int]]:
    """Response of the next example with another prompt, in a circle, for each example.

    Raises:
        UserError: all prompts are the same, or all responses are of one kind.
    """
    if not examples:
        return []
    if len(kinds := {example.good for example in examples}) == 1:
        kind, other = ("desirable", "undesirable") if kinds == {True} else ("undesirable", "desirable")
        raise UserError(
            f"{examples[0].location}: the response is {kind}, as all {len(examples):,} are; "
            f"expected some that are {other}"
        )
    # From the end of a second round: the next other prompt of an example is its neighbour, or its neighbour's.
    count, following = len(examples), [0] * (2 * len(examples))
    for position in reversed(range(2 * count - 1)):
        same = examples[position % count].prompt == examples[(position + 1) % count].prompt
        following[position] = following[position + 1] if same else (position + 1) % count
    if examples[following[0]].prompt == examples[0].prompt:
        raise UserError(
            f"{examples[0].location}: all {count:,} examples have the same prompt; expected several, since a response "
            "is compared with one to another prompt"
        )
    return [examples[following[position]].responses[0] for position in range(count)]


def _prompt(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, pair: Pair) -> list[int]:
    if is_messages(pair.prompt):
        return encode_text(tokenizer, template.prompt(pair.prompt, pair.location, pair.tools), pair.location)
    if template.config.system is not None:
        raise UserError(f"{pair.location}: the prompt is no messages, and data.pairs.chat.system is set; expected them")
    if not isinstance(pair.prompt, str):
        return list(pair.prompt)  # type: ignore[arg-type]
    tokens = encode_prompt(tokenizer, pair.prompt, f"{pair.location}: the prompt")
    if not tokens:
        raise UserError(f"{pair.location}: the prompt has no tokens, expected at least one")
    return tokens


def _response(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, pair: Pair, text: Text | None
) -> list[int] | None:
    """A response as tokens. Of messages, the assistant's last one: no other may follow the prompt."""
    if text is None:
        return None
    if is_messages(text):
        if not is_messages(pair.prompt) or len(text) != 1 or text[0].get("role") != "assistant":
            raise UserError(
                f"{pair.location}: a response of {len(text)} messages, expected one of the assistant after a prompt of "
                "messages"
            )
        conversation = Encoder(template, tokenizer).conversation(
            [*pair.prompt, *text], pair.location, "last", pair.tools
        )
        return conversation.tokens[conversation.start :]
    if isinstance(text, str):
        return ended(tokenizer, encode_continuation(tokenizer, text, f"{pair.location}: the response"))
    return list(text)  # type: ignore[arg-type]


def _cut(
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    pair: Pair,
    tokens: list[int],
    capacity: int,
    policy: OverlongPolicy,
) -> list[int]:
    if is_messages(pair.prompt):
        return cut_messages(
            tokenizer, template, pair.prompt, tokens, Fit(1, None, capacity, policy), pair.location, pair.tools
        )
    if isinstance(pair.prompt, str):
        return cut(tokenizer, pair.prompt, tokens, capacity, policy)
    if policy == "cut_middle":
        return middle_cut(tokens, capacity)
    return tokens[-capacity:] if policy == "cut_left" else tokens[:capacity]
