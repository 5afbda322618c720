"""All prompts of a recipe as tokens, of training and of its held-out sets, and the notes on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hybridflow.config.recipe import Recipe
from hybridflow.data.given_responses import pair_notes
from hybridflow.planning.data.evaluation_sets import encode_sets, set_notes
from hybridflow.planning.data.prompts import (
    context_tokens,
    encode,
    file_notes,
    memory_notes,
    overlong_notes,
    phase_limits,
    prompt_limit,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RecipePrompts:
    """The prompts of a recipe as tokens.

    Args:
        recipe: with the data and the sets.
        tokenizer: of the model.

    Raises:
        UserError: as of `encode` and `encode_sets`.
    """

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self._recipe, self._tokenizer = recipe, tokenizer
        self._given = not recipe.algorithm.needs_engines
        self.limit = prompt_limit(recipe.rollout, recipe.model, given=self._given)
        """Tokens of the longest prompt."""
        self.of_training = encode(
            recipe.data,
            recipe.rollout,
            recipe.algorithm,
            recipe.environment,
            tokenizer,
            self.limit,
            supervises=recipe.warmup is not None,
        )
        self.phases = {"training": self.of_training.train, "supervised": self.of_training.sft}
        """Prompts of each phase that trains."""
        self.sets = encode_sets(recipe, tokenizer)
        """Prompts of each held-out set."""

    def notes(self) -> list[str]:
        """A line for each reason for which prompts are cut, dropped or unused, and each remark on texts."""
        recipe, tokenizer, phases = self._recipe, self._tokenizer, self.phases
        policy, context = recipe.data.overlong_prompts, context_tokens(recipe.rollout.engine, recipe.model)
        return [
            *self._use_notes(),
            *overlong_notes(policy, phases, phase_limits(recipe.rollout, self.limit), given=self._given),
            *pair_notes(phases, tokenizer),
            *file_notes(tokenizer, phases),
            *memory_notes(tokenizer, phases, self.of_training.answers),
            *set_notes(recipe.sets, policy, tokenizer, context, self.sets, list(phases.values())),
        ]

    def _use_notes(self) -> Iterator[str]:
        files = self._recipe.data.files
        if files is not None and files.sft and self._recipe.warmup is None and not self._given:
            yield "data.files.sft is not read: warmup is null"
