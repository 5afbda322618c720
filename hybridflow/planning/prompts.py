"""The prompts and answers of a recipe as tokens."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.config.initial_model import initial_spec
from hybridflow.config.recipe import Recipe
from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import load_splits
from hybridflow.data.tokenizer import encode_answers, fit_prompts


def prompt_limit(recipe: Recipe) -> int:
    """Most tokens of a prompt: what the context leaves beside the response.

    Raises:
        UserError: the response alone fills the context.
    """
    context = recipe.rollout.engine.context_length or initial_spec(recipe).sizes.max_positions
    response = recipe.rollout.sampling.max_new_tokens
    if response >= context:
        raise UserError(
            f"rollout.sampling.max_new_tokens={response} leaves no room for a prompt in a context of {context} tokens"
        )
    return context - response


def encode(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, limit: int
) -> tuple[Prompts, Prompts, Prompts, list[list[int]]]:
    """Training, evaluation and supervised prompts, and the supervised answers, as tokens.

    Raises:
        UserError: naming the prompt that cannot be encoded, or is longer than `limit` tokens and to be refused; or
            dropping those that are too long leaves none.
    """
    splits = load_splits(recipe.data)
    wanted = {
        "training": splits.train,
        "held-out": splits.evaluation[: recipe.trainer.eval_prompts],
        "supervised": splits.sft if recipe.warmup is not None else [],
    }
    policy = recipe.data.overlong_prompts
    phases = {
        name: Prompts(*fit_prompts(tokenizer, examples, max_tokens=limit, policy=policy))
        for name, examples in wanted.items()
    }
    for name, phase in phases.items():
        if wanted[name] and not len(phase):
            raise UserError(
                f"data.overlong_prompts=drop leaves no {name} prompt: all {len(wanted[name]):,} have more than "
                f"{limit} tokens"
            )
    train, evaluation, sft = phases.values()
    answers = encode_answers(tokenizer, sft.examples, max_tokens=recipe.rollout.sampling.max_new_tokens)
    return train, evaluation, sft, answers


def overlong_notes(recipe: Recipe, phases: Mapping[str, Prompts], limit: int) -> list[str]:
    """A line for each phase of which prompts were cut or dropped.

    Args:
        recipe: with the policy.
        phases: by the name of their prompts.
        limit: tokens of the longest prompt that stays as it is.
    """
    policy = recipe.data.overlong_prompts
    done = {"drop": "dropped", "cut_left": "cut, at their beginning", "cut_right": "cut, at their end"}
    return [
        f"data: {phase.overlong:,} of {len(phase) + phase.overlong * (policy == 'drop'):,} {name} prompts have more "
        f"than {limit} tokens and are {done[policy]} (data.overlong_prompts={policy})"
        for name, phase in phases.items()
        if phase.overlong
    ]
