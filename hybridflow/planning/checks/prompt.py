"""Checks that the prompts of a recipe fit its model and its context."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.rollout.cache import tokens_beyond
from engine3d.rollout.config import RolloutConfig
from hybridflow.config.fit.algorithm import pretraining_misfits
from hybridflow.config.initial_model import initial_tokenizer
from hybridflow.config.recipe import Recipe
from hybridflow.data.files.config import FilesConfig
from hybridflow.data.files.conversations.supervised import SupervisedPrompts
from hybridflow.data.given_responses import GivenResponses
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts
from hybridflow.data.tokenizer import special_tokens
from hybridflow.environments.agents.host import agent_parser, agent_template
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.environments.observation_tokens import observation_template, tool_messages
from hybridflow.planning.checks.engine import check_same_tokens, end_notes
from hybridflow.planning.checks.environment import check_environment
from hybridflow.planning.data.evaluation_sets import check_sets
from hybridflow.planning.data.recipe_prompts import RecipePrompts
from hybridflow.planning.memory.samples import Lengths

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodedPrompts:
    """Encoded prompts of a recipe, with their lengths and notes.

    Args:
        lengths: how long prompts and responses are.
        train: the prompts to learn from.
        sets: the prompts of each held-out set.
        notes: which prompts are cut or dropped, in lines.
        special_tokens: that the texts of responses lack.
    """

    lengths: Lengths
    train: Prompts
    sets: Mapping[str, Prompts]
    notes: list[str]
    special_tokens: tuple[str, ...] = ()


def encoded_prompts(recipe: Recipe, spec: ModelSpec, layouts: Mapping[str, Layout] | None = None) -> EncodedPrompts:
    """Every prompt and supervised answer against the tokenizer, the vocabulary and the context.

    Args:
        layouts: of each model, and of the engines as "rollout", where they are known.

    Raises:
        UserError: naming the prompt that cannot be encoded or is too long, a vocabulary that the tokenizer exceeds, a
            model of other tokens, a role of observations that the template does not render, too few prompts to evaluate
            with, or a KV cache without room for one sequence.
    """
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer, files = initial_tokenizer(recipe.model, Path(scratch))
        served = {"teacher": recipe.teacher} if recipe.teacher_engine is not None else {}
        for role, model in (recipe.models | served).items():
            if model is not None and model.path is not None:
                check_same_tokens(role, model.path, files)
    if len(tokenizer) > spec.vocab_size:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens and the model's vocab_size is {spec.vocab_size}; "
            "expected at least as many"
        )
    if recipe.environment is not None:
        _check_observations(recipe.environment, recipe.data.files, tokenizer)
    prompts = RecipePrompts(recipe, tokenizer)
    train, sft, sets = prompts.of_training.train, prompts.of_training.sft, prompts.sets
    for what, tokens in _all_tokens(prompts).items():
        check_token_ids(what, tokens, spec.vocab_size)
    check_token_ids(
        "end-of-sequence and pad token", [[tokenizer.eos_token_id, tokenizer.pad_token_id]], spec.vocab_size
    )
    planned = recipe.for_prompts(len(train))
    for error in (*planned.keep_best_errors(), *pretraining_misfits(recipe.algorithm, planned.trainer.steps)):
        raise UserError(error)
    if recipe.warmup is not None and not len(sft):
        raise UserError(
            "warmup: the data has no supervised examples; expected data.arithmetic.sft_size, files.sft, jsonl.sft_path "
            "or pairs.sft_path"
        )
    if layouts is not None:
        check_sets(recipe.sets, sets, layouts)
    lengths = Lengths.of(recipe.rollout, recipe.sets, train.tokens, sets)
    if isinstance(train, GivenResponses):
        lengths = replace(lengths, response=max(len(tokens) for both in train.responses for tokens in both))
    _check_cache(recipe.rollout.engine, lengths)
    notes = end_notes(recipe.rollout.sampling, recipe.model, spec, tokenizer) if recipe.starts_engines else []
    return EncodedPrompts(lengths, train, sets, [*notes, *prompts.notes()], special_tokens(tokenizer))


def _check_observations(
    environment: EnvironmentConfig, files: FilesConfig | None, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse observations and calls of tools that the chat template does not render."""
    chat = files.chat if files is not None else None
    observation_template(environment, chat, tokenizer)
    if environment.tool_parser is not None:
        agent_parser(environment, agent_template(chat, tokenizer), tokenizer)
    if environment.tools is not None:
        tool_messages(environment, chat, check_environment(environment), tokenizer)


def _all_tokens(prompts: RecipePrompts) -> dict[str, Sequence[Sequence[int]]]:
    """Token ids of all prompts, and of the answers and responses that the data have, by the name of their phase."""
    train, sft, sets = prompts.of_training.train, prompts.of_training.sft, prompts.sets
    tokens: dict[str, Sequence[Sequence[int]]] = {"prompt": train.tokens}
    if isinstance(sft, SupervisedPrompts) and sft.packed is not None:
        tokens |= {"supervised example": sft.packed}
    else:
        tokens |= {"supervised prompt": sft.tokens, "supervised answer": prompts.of_training.answers}
    tokens |= {f"evaluation.{name} prompt": of_set.tokens for name, of_set in sets.items()}
    for name, phase in {"pair": train, **{f"evaluation.{name} pair": of_set for name, of_set in sets.items()}}.items():
        if isinstance(phase, GivenResponses):
            tokens[f"{name} first"] = [pair[0] for pair in phase.responses]
            tokens[f"{name} second"] = [pair[1] for pair in phase.responses]
    return tokens


def _check_cache(engine: RolloutConfig, lengths: Lengths) -> None:
    """Refuse a KV cache without room for one sequence."""
    given = engine.max_total_tokens
    beyond = tokens_beyond(engine.draft_tokens)
    longest = (lengths.longest_sequence + beyond) * engine.attention_dp
    if given is not None and given < longest:
        groups = ", for each of attention_dp" if engine.attention_dp > 1 else ""
        drafts = f" with draft_tokens={engine.draft_tokens}" if engine.draft_tokens else ""
        raise UserError(
            f"rollout.engine.max_total_tokens={given}, expected at least {longest}: the longest prompt, the longest "
            f"response and the {beyond} that SGLang keeps{drafts}{groups}; or null for as many as the requests need"
        )


def check_token_ids(what: str, encoded: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Token ids against the model's vocabulary: a tokenizer may have fewer tokens than its largest id.

    Raises:
        UserError: names the text and the id.
    """
    if (beyond := PackedPrompts.of(encoded).first_above(vocab_size - 1)) is not None:
        index, token = beyond
        raise UserError(
            f"model: {what} {index} has token id {token} and the model's vocab_size is {vocab_size}; expected a "
            "tokenizer of this model"
        )
