"""Memory for the samples of a recipe at their longest: KV caches of engines, the replay buffer and the sample store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine3d.errors import UserError, amount
from engine3d.rollout.cache import PAGE_TOKENS, samples_together, tokens_needed
from engine3d.rollout.config import RolloutConfig
from hybridflow.algorithms.replay import most_bytes
from hybridflow.cluster.devices.device_map import DeviceKind
from hybridflow.config.evaluation import PlannedSet
from hybridflow.config.roles import RolloutRole
from hybridflow.config.run import SamplesConfig
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts


@dataclass(frozen=True, slots=True)
class SetLengths:
    """Prompts and samples of a set of `evaluation`.

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
    """Tokens that a recipe's prompts ask of its engines.

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
    def of(
        cls,
        rollout: RolloutRole,
        planned: Mapping[str, PlannedSet],
        train: Sequence[Sequence[int]],
        sets: Mapping[str, Prompts],
    ) -> Lengths:
        """The lengths of a recipe's prompts.

        Args:
            rollout: settings of the engines.
            planned: the sets of the recipe.
            train: the token ids of each prompt to learn from.
            sets: the prompts of each set.
        """
        table, lengths = rollout.sampling_table, np.unique(PackedPrompts.of(train).lengths()).tolist()
        adaptive = bool(rollout.adaptive_sampling)
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
        """Tokens of the longest training prompt, with the longest response to it."""
        return self.prompt + self.response if self.together is None else self.together

    @property
    def longest_sequence(self) -> int:
        """Tokens of all that the engines generate."""
        return max((self.sequence, *(lengths.sequence for lengths in self.sets)))


def cache_tokens(rollout: RolloutRole, groups_in_flight: int, lengths: Lengths, engines: int, kind: DeviceKind) -> int:
    """Count the tokens that each engine's KV cache holds at most. A GPU with less memory holds fewer.

    Args:
        rollout: whose `engine.max_total_tokens` decides, if it is set.
        groups_in_flight: prompts to which engines respond at the same time, at most.
        lengths: of its prompts.
        engines: among which prompts are dealt.
        kind: of their devices.
    """
    given = rollout.engine.max_total_tokens
    if given is not None:
        return given
    page = PAGE_TOKENS[kind]
    phases = (
        (groups_in_flight, rollout.samples_per_prompt, lengths.sequence),
        *((lengths_of_set.prompts, lengths_of_set.samples, lengths_of_set.sequence) for lengths_of_set in lengths.sets),
    )
    groups = rollout.engine.attention_dp
    return groups * max(
        tokens_needed(
            requests=running_requests(rollout.engine, prompts=prompts, samples=samples, engines=engines),
            sequence_tokens=sequence,
            page_tokens=page,
        )
        for prompts, samples, sequence in phases
        if prompts
    )


def teacher_cache_tokens(config: RolloutConfig, samples: int, lengths: Lengths, engines: int, kind: DeviceKind) -> int:
    """KV cache tokens of each engine of the teacher, which reads a step's samples and generates nothing."""
    if config.max_total_tokens is not None:
        return config.max_total_tokens
    return config.attention_dp * tokens_needed(
        requests=min(config.requests_of_a_group, -(-samples // (engines * config.attention_dp))),
        sequence_tokens=lengths.sequence + 1,
        page_tokens=PAGE_TOKENS[kind],
    )


def running_requests(config: RolloutConfig, *, prompts: int, samples: int, engines: int) -> int:
    """Requests that an engine runs at once when so many prompts, with so many samples each, are dealt to all.

    Where groups of its ranks have attention of their own, those of one group.
    """
    of_an_engine = -(-prompts // engines)
    together = samples_together(of_an_engine, samples, config.attention_dp)
    shares = -(-of_an_engine * samples // (together * config.attention_dp))
    return min(config.requests_of_a_group, shares * together)


_COPIES = 3
"""Kept samples; those of a checkpoint that is still being written; and a copy that either needs."""


def replay_bytes(kept_samples: int, sequence_tokens: int) -> int:
    """The most that the driver's host holds of them.

    Args:
        kept_samples: that the algorithm keeps for later steps.
        sequence_tokens: of the longest prompt with its response.
    """
    return _COPIES * most_bytes(kept_samples, sequence_tokens)


def check_kept_routes(kept_samples: int, *, routes: bool) -> None:
    """Refuse to keep samples with routes for later steps.

    Raises:
        UserError: names the settings.
    """
    if kept_samples and routes:
        raise UserError(
            f"algorithm.replay_buffer_size={kept_samples} was not tried with rollout.engine.routes=true, "
            "expected 0 or no routes"
        )


def check_replay(kept_samples: int, sequence_tokens: int, host_bytes: int | None) -> None:
    """Refuse a buffer that, full of the longest samples, is larger than its host's memory.

    Args:
        kept_samples: that the algorithm keeps for later steps.
        sequence_tokens: of the longest prompt with its response.
        host_bytes: of the driver's host, if that is known.

    Raises:
        UserError: naming the setting, and the most that there is room for.
    """
    needed = replay_bytes(kept_samples, sequence_tokens)
    if host_bytes is None or needed <= host_bytes:
        return
    most = host_bytes // (_COPIES * most_bytes(1, sequence_tokens))
    raise UserError(
        f"algorithm.replay_buffer_size={kept_samples}: samples of up to {sequence_tokens:,} tokens "
        f"take {amount(needed, 1)} with their copies, on a host of {amount(host_bytes, 1)}; expected at most "
        f"{most:,}"
    )


_TOKEN_BYTES = 5
"""On the disk, of a response token: measured with random ids out of 150,000 and random log-probs, the least that can be
compressed."""
_MB = 1_000_000


def store_notes(settings: SamplesConfig, samples: int, sequence_tokens: int, route_bytes: int = 0) -> list[str]:
    """A line where the samples of one step may take more than the store is to keep.

    It is no error: responses may be far shorter than the longest, and the newest step stays in any case.

    Args:
        settings: of the store.
        samples: of a step.
        sequence_tokens: of the longest prompt with its response.
        route_bytes: of the routes of a token, which compress little.
    """
    keep_mb = settings.keep_mb
    most = samples * sequence_tokens * (_TOKEN_BYTES + route_bytes)
    if not settings.store or keep_mb is None or most <= keep_mb * _MB:
        return []
    return [
        f"samples.keep_mb={keep_mb}: {samples:,} samples of up to {sequence_tokens:,} tokens may take "
        f"{most / _MB:,.0f} MB, and then only those of the newest step are kept"
    ]
