"""Memory for the samples of a recipe at their longest: KV caches of engines, the replay buffer and the sample store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine3d.errors import UserError, amount
from engine3d.layout import Layout
from engine3d.models import ModelSpec
from engine3d.rollout.cache import PAGE_TOKENS, samples_together, tokens_needed
from engine3d.rollout.config import RolloutConfig
from hybridflow.algorithms.replay import most_bytes
from hybridflow.cluster.devices.device_map import Device, DeviceKind
from hybridflow.config.evaluation import PlannedSet
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import Prompts
from hybridflow.rollout.config import RolloutRole
from hybridflow.rundir.samples.config import SamplesConfig


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
        engines: over which prompts are distributed.
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
            draft_tokens=rollout.engine.draft_tokens,
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
    """Requests that an engine runs at once when `prompts` prompts with `samples` samples each are distributed over all.

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


def route_bytes_by_node(
    spec: ModelSpec,
    layout: Layout,
    devices: Sequence[Device],
    engines: Sequence[Device],
    *,
    step_tokens: int,
    micro_batch_tokens: int,
) -> dict[int, int]:
    """Most bytes of a step's routes in host memory, by node.

    A node has the routes of its engines, and once those of its data-parallel replicas' samples that come from other
    nodes. A rank reads those of its positions and layers from there, one micro-batch at a time.

    Args:
        spec: the actor.
        layout: of its ranks.
        devices: of its ranks, in order.
        engines: devices of the engines whose routes are replayed; empty where the actor's ranks record them.
        step_tokens: of all samples of a step.
        micro_batch_tokens: of the largest micro-batch.
    """
    from engine3d.models.experts.routes import RouteFormat  # imports torch

    routes, tokens = RouteFormat.of(spec.sizes), -(-step_tokens // layout.dp)
    of_stages = [
        routes.topk
        * routes.dtype.itemsize
        * sum(spec.sizes.is_sparse(layer) for chunk in spec.rules.rank_layers(layout, stage) for layer in chunk)
        for stage in range(layout.pp)
    ]
    bytes_of, positions = Counter[int](), -(-micro_batch_tokens // (layout.tp * layout.cp))
    for rank, device in enumerate(devices):
        bytes_of[device.node] += _READ_COPIES * positions * of_stages[layout.coordinates(rank).pp]
    for node, of_node in Counter(device.node for device in engines).items():
        bytes_of[node] += step_tokens * routes.token_bytes * of_node // len(engines)
    for dp in range(layout.dp):
        nodes = {device.node for rank, device in enumerate(devices) if layout.coordinates(rank).dp == dp}
        if engines:
            sources = {device.node for device in engines}
        else:
            recorder = devices[layout.rank(dp=dp, pp=layout.pp - 1)].node
            sources = {recorder}
            # Gathered layer by layer in its process, and as they are stored.
            bytes_of[recorder] += tokens * (2 * routes.token_bytes + of_stages[-1])
        for node in nodes if len(nodes | sources) > 1 else ():
            bytes_of[node] += tokens * routes.token_bytes
    return dict(bytes_of)


_READ_COPIES = 2
"""Copies of a micro-batch's routes in a rank's host memory: as read, and page-locked or on a device of a CPU."""


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
