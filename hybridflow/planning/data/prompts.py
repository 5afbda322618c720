"""The prompts and answers of a recipe as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.rollout.config import RolloutConfig
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.initial_model import initial_spec
from hybridflow.data.config import DataConfig, OverlongPolicy, SameResponses
from hybridflow.data.files.config import FilesConfig
from hybridflow.data.files.conversations.supervised import SupervisedPrompts, encode_supervised
from hybridflow.data.files.encoding import encode_files
from hybridflow.data.files.prompts import FilePrompts, SourceSpan
from hybridflow.data.given_responses import GivenResponses, encode_pairs
from hybridflow.data.pairs import Pair, load_better_responses, load_pairs
from hybridflow.data.prompts import Prompts
from hybridflow.data.remarks import RemarkCounts, lines, located, of_prompt, of_response
from hybridflow.data.sampler import PromptOrder, SourceOrder
from hybridflow.data.tasks import Example, load_splits
from hybridflow.data.tokenizer import encode_answers, fit_prompts
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.planning.checks.environment import with_tools
from hybridflow.roles.config import ModelConfig
from hybridflow.rollout.config import RolloutRole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def context_tokens(engine: RolloutConfig, model: ModelConfig) -> int:
    """Most tokens of a prompt with its response."""
    return engine.context_length or initial_spec(model).sizes.max_positions


def prompt_limit(rollout: RolloutRole, model: ModelConfig, *, given: bool) -> int:
    """Most tokens of a prompt: those that the longest response leaves of the context.

    Args:
        rollout: settings of the responses.
        model: to be trained.
        given: True if the data have the responses, which share the context with the prompt.

    Raises:
        UserError: the response alone fills the context.
    """
    context, response = context_tokens(rollout.engine, model), rollout.sampling.max_new_tokens
    if given:
        return context
    if response >= context:
        raise UserError(
            f"rollout.sampling.max_new_tokens={response} leaves no room for a prompt in a context of {context} tokens"
        )
    return context - response


def training_limit(rollout: RolloutRole, limit: int) -> int:
    """Most tokens of a prompt to learn from, where an evaluation has room for `limit`.

    Raises:
        UserError: by `rollout.adaptive_sampling` some responses would not fit into the context.
    """
    if not rollout.adaptive_sampling:
        return limit
    return rollout.sampling_table.prompt_limit(limit + rollout.sampling.max_new_tokens)


def phase_limits(rollout: RolloutRole, limit: int) -> dict[str, int]:
    """Most tokens of a prompt of each phase that trains, where the longest response leaves room for `limit`."""
    return {"training": training_limit(rollout, limit), "supervised": limit}


@dataclass(frozen=True)
class Encoded:
    """The prompts of a recipe as tokens.

    Args:
        train: to learn from.
        sft: of supervised examples.
        answers: what follows each of the last, as token ids.
        masks: of each token of an answer, whether it is learned; all are if None.
    """

    train: Prompts
    sft: Prompts
    answers: Sequence[list[int]]
    masks: Sequence[list[bool]] | None = None


def encode(
    data: DataConfig,
    rollout: RolloutRole,
    algorithm: AlgorithmSettings,
    environment: EnvironmentConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    supervises: bool,
) -> Encoded:
    """Training and supervised prompts, and the supervised answers, as tokens.

    Args:
        data, rollout, algorithm: settings of a recipe.
        environment: of episodes, whose tools prompts name; None without one.
        tokenizer: of the model.
        limit: tokens of the longest prompt; see `prompt_limit`.
        supervises: True with a warm-up; there are no supervised prompts otherwise.

    Raises:
        UserError: naming the prompt that cannot be encoded, or is longer than `limit` tokens and to be refused; or
            dropping those that are too long leaves none.
    """
    supervised: Sequence[Example] = []
    if data.pairs is not None:
        if supervises:
            supervised = load_better_responses(data.pairs)
        return _encode_given(data, tokenizer, supervised, limit, unpaired=algorithm.unpaired)
    splits = load_splits(data)
    if supervises:
        supervised = splits.sft
    if not algorithm.needs_engines:
        return _encode_given(data, tokenizer, supervised, limit, unpaired=algorithm.unpaired)
    policy = data.overlong_prompts
    if data.files is not None:
        files = with_tools(data.files, environment)
        return _encode_files(files, policy, rollout, tokenizer, limit, supervises=supervises)
    examples_of = {"training": splits.train, "supervised": supervised}
    limits = phase_limits(rollout, limit)
    phases = {
        name: Prompts(*fit_prompts(tokenizer, examples, max_tokens=limits[name], policy=policy))
        for name, examples in examples_of.items()
    }
    for name, phase in phases.items():
        _check_left(name, phase, len(examples_of[name]), f"more than {limits[name]} tokens")
    train, sft = phases.values()
    answers = encode_answers(tokenizer, sft.examples, max_tokens=rollout.sampling.max_new_tokens)
    return Encoded(train, sft, answers)


def _encode_files(
    files: FilesConfig,
    policy: OverlongPolicy,
    rollout: RolloutRole,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    *,
    supervises: bool,
) -> Encoded:
    """Encode rows of files as `encode` does. Held-out prompts of files are those of the sets of `evaluation`."""
    train = encode_files(files.train, files, tokenizer, max_tokens=training_limit(rollout, limit), policy=policy)
    _check_spans("train", train.spans)
    if not supervises or not files.sft:
        return Encoded(train, Prompts([], []), [])
    most = limit + rollout.sampling.max_new_tokens  # the longest response has room next to the prompt
    supervised = encode_supervised(files.sft, files, tokenizer, max_tokens=most, policy=policy)
    _check_spans("sft", supervised.prompts.spans)
    return Encoded(train, supervised.prompts, supervised.answers, supervised.masks)


def _check_spans(what: str, spans: Sequence[SourceSpan]) -> None:
    """Raises UserError where a source has no row left."""
    for span in spans:
        if span.begin == span.end:
            why = "; ".join(f"{count:,} with {reason}" for reason, count in span.dropped.items())
            raise UserError(f"data.files.{what}: no row of {span.label} is left ({why})")


def prompt_order(data: DataConfig, seed: int, prompts_per_step: int, prompts: Prompts) -> PromptOrder:
    """The order in which training prompts are drawn.

    Args:
        data: settings of the data.
        seed: of the order.
        prompts_per_step: of the run.
        prompts: of training.
    """
    files = data.files
    if files is None or not isinstance(prompts, FilePrompts):
        return PromptOrder(len(prompts), seed)
    sources = tuple(
        SourceOrder(span.label, span.begin, span.end, source.weight)
        for span, source in zip(prompts.spans, files.train, strict=True)
    )
    return PromptOrder(len(prompts), seed, sources, prompts_per_step, files.difficulty)


def file_notes(tokenizer: PreTrainedTokenizerBase, phases: Mapping[str, Prompts]) -> list[str]:
    """A line for each source of which rows were dropped, and one where texts are read beside a chat template."""
    notes = []
    for name, phase in phases.items():
        if not isinstance(phase, FilePrompts | SupervisedPrompts):
            continue
        for span in phase.spans:
            if span.dropped:
                kept, count = span.end - span.begin, sum(span.dropped.values())
                why = ", ".join(f"{number:,} with {reason}" for reason, number in span.dropped.items())
                notes.append(f"data: {count:,} of {kept + count:,} {name} rows of {span.label} are dropped: {why}")
            notes += lines(span.remarks, tokenizer, f"{name} rows of {span.label}")
        if isinstance(phase, FilePrompts) and phase.raw and tokenizer.chat_template is not None:
            notes.append(
                f"data: {phase.raw:,} {name} prompts are texts and go to the model as they are, without the "
                "tokenizer's chat template (data.files.chat.texts=raw)"
            )
    return notes


def memory_notes(
    tokenizer: PreTrainedTokenizerBase, phases: Mapping[str, Prompts], answers: Sequence[list[int]] = ()
) -> list[str]:
    """A line for each remark on prompts that are held in memory.

    Args:
        tokenizer: of their tokens.
        phases: by the name of their prompts.
        answers: to the supervised prompts, all of whose tokens are trained on.
    """
    notes = []
    for name, phase in phases.items():
        if isinstance(phase, FilePrompts | SupervisedPrompts | GivenResponses):
            continue
        remarks = RemarkCounts()
        for number, tokens in enumerate(phase.tokens):
            remarks.add(number, of_prompt(tokenizer, tokens, is_text=True))
        for number, answer in enumerate(answers if name == "supervised" else ()):
            remarks.add(number, of_response(tokenizer, answer, [True] * len(answer)))
        notes += lines(located(remarks.counts, lambda number: f"prompt {number}"), tokenizer, f"{name} prompts")
    return notes


def _encode_given(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    supervised: Sequence[Example],
    context: int,
    *,
    unpaired: bool,
) -> Encoded:
    """Encode responses of the data as `encode` does. Prompts share the context with these responses."""
    policy, pairs = data.overlong_prompts, load_pairs(data, unpaired=unpaired)
    train = encode_given(data, tokenizer, pairs, "training", context, unpaired=unpaired)
    longest = max(map(len, encode_answers(tokenizer, supervised, max_tokens=context - 1)), default=0)
    sft = Prompts(*fit_prompts(tokenizer, supervised, max_tokens=context - longest, policy=policy))
    _check_left("supervised", sft, len(supervised), f"more than {context - longest} tokens")
    answers = encode_answers(tokenizer, sft.examples, max_tokens=longest or 1)
    return Encoded(train, sft, answers)


def encode_given(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    name: str,
    context: int,
    *,
    unpaired: bool,
) -> GivenResponses:
    """Pairs of a recipe's data as tokens.

    Args:
        data: settings of the data.
        tokenizer: of the model.
        pairs: of one phase.
        name: of the phase, for errors.
        context: most tokens of a prompt and a response to it.
        unpaired: true if examples have one response, as `AlgorithmSettings.unpaired`.

    Raises:
        UserError: naming the pair that cannot be encoded, or none is left.
    """
    given = data.pairs
    same: SameResponses = given.same_responses if given is not None else "refuse"
    responses = encode_pairs(
        tokenizer,
        pairs,
        context=context,
        policy=data.overlong_prompts,
        same=same,
        unpaired=unpaired,
        chat=given.chat if given is not None else None,
    )
    _check_left(name, responses, len(pairs), f"no room for their responses in {context} tokens")
    return responses


def _check_left(name: str, phase: Prompts, given: int, have: str) -> None:
    if given and not len(phase):
        raise UserError(f"data.overlong_prompts=drop leaves no {name} prompt: all {given:,} have {have}")


def overlong_notes(
    policy: OverlongPolicy, phases: Mapping[str, Prompts], limits: Mapping[str, int], *, given: bool
) -> list[str]:
    """A line for each phase of which prompts were cut or dropped.

    Args:
        policy: `data.overlong_prompts`.
        phases: by the name of their prompts.
        limits: tokens of the longest prompt of each that stays as it is.
        given: true if the data have the responses.
    """
    done = {
        "drop": "dropped",
        "cut_left": "cut, at their beginning",
        "cut_right": "cut, at their end",
        "cut_middle": "cut, in their middle",
    }
    have = {name: "no room for their responses" if given else f"more than {limits[name]} tokens" for name in phases}
    return [
        f"data: {phase.overlong:,} of {len(phase) + phase.overlong * (policy == 'drop'):,} {name} prompts have "
        f"{have[name]} and are {done[policy]} (data.overlong_prompts={policy})"
        for name, phase in phases.items()
        if phase.overlong and not isinstance(phase, SupervisedPrompts)  # which are dropped, as `file_notes` says
    ]
