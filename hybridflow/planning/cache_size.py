"""The KV cache that a recipe's engines need: room for the requests of a step, or of an evaluation, at their longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine3d.rollout.cache import PAGE_TOKENS, samples_together, tokens_needed
from hybridflow.cluster.devices.device_map import DeviceKind
from hybridflow.config.recipe import Recipe
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts


@dataclass(frozen=True, slots=True)
class SetLengths:
    """What a set of `evaluation` asks of the engines.

    Args:
        prompts: how many.
        samples: responses to each.
        sequence: tokens of its longest prompt, with the longest response.
    """

    prompts: int
    samples: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """What a recipe's prompts ask of its engines, in tokens.

    Args:
        prompt: of the longest prompt to learn from.
        response: of the longest response to learn from.
        together: of the longest prompt to learn from with the longest response to it; as many as both if None.
        sets: of `evaluation`.
    """

    prompt: int
    response: int
    together: int | None = None
    sets: tuple[SetLengths, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, train: Sequence[Sequence[int]], sets: Mapping[str, Prompts]) -> Lengths:
        """The lengths of a recipe's prompts.

        Args:
            recipe: of the run.
            train: the token ids of each prompt to learn from.
            sets: the prompts of each set.
        """
        table, lengths = recipe.rollout.sampling_table, np.unique(PackedPrompts.of(train).lengths()).tolist()
        adaptive, planned = bool(recipe.rollout.adaptive_sampling), recipe.sets
        return cls(
            prompt=max(lengths, default=0),
            response=table.longest_response,
            together=max(map(table.sequence_tokens, lengths), default=0) if adaptive else None,
            sets=tuple(
                SetLengths(
                    prompts=len(prompts),
                    samples=planned[name].settings.samples,
                    sequence=int(PackedPrompts.of(prompts.tokens).lengths().max())
                    + planned[name].sampling.max_new_tokens,
                )
                for name, prompts in sets.items()
            ),
        )

    @property
    def sequence(self) -> int:
        """Of the longest prompt to learn from, with the longest response to it."""
        return self.prompt + self.response if self.together is None else self.together

    @property
    def longest_sequence(self) -> int:
        """Of all that the engines generate."""
        return max((self.sequence, *(each.sequence for each in self.sets)))


def cache_tokens(recipe: Recipe, lengths: Lengths, engines: int, kind: DeviceKind) -> int:
    """Tokens that each engine's KV cache has room for at most: less where a GPU has no more memory for it.

    Args:
        recipe: whose `rollout.engine.max_total_tokens` decides, if it is set.
        lengths: of its prompts.
        engines: among which prompts are dealt.
        kind: of their devices.
    """
    given = recipe.rollout.engine.max_total_tokens
    if given is not None:
        return given
    page = PAGE_TOKENS[kind]
    phases = (
        (recipe.groups_under_way, recipe.rollout.samples_per_prompt, lengths.sequence),
        *((each.prompts, each.samples, each.sequence) for each in lengths.sets),
    )
    groups = recipe.rollout.engine.attention_dp
    return groups * max(
        tokens_needed(
            requests=running_requests(recipe, prompts=prompts, samples=samples, engines=engines),
            sequence_tokens=sequence,
            page_tokens=page,
        )
        for prompts, samples, sequence in phases
        if prompts
    )


def teacher_cache_tokens(recipe: Recipe, lengths: Lengths, engines: int, kind: DeviceKind) -> int:
    """As `cache_tokens`, of each engine of the teacher, which reads a step's samples and generates nothing."""
    config = recipe.teacher_engine
    assert config is not None
    if config.max_total_tokens is not None:
        return config.max_total_tokens
    samples = recipe.trainer.prompts_per_step * recipe.rollout.samples_per_prompt
    return config.attention_dp * tokens_needed(
        requests=min(config.requests_of_a_group, -(-samples // (engines * config.attention_dp))),
        sequence_tokens=lengths.sequence + 1,
        page_tokens=PAGE_TOKENS[kind],
    )


def running_requests(recipe: Recipe, *, prompts: int, samples: int, engines: int) -> int:
    """Requests that an engine runs at once when so many prompts, with so many samples each, are dealt to all.

    Where groups of its ranks have attention of their own, those of one group.
    """
    config = recipe.rollout.engine
    of_an_engine = -(-prompts // engines)
    together = samples_together(of_an_engine, samples, config.attention_dp)
    shares = -(-of_an_engine * samples // (together * config.attention_dp))
    return min(config.requests_of_a_group, shares * together)
