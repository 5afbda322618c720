"""What a stream of rollouts does not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.roles import RolloutRole
from hybridflow.config.run import TrainerConfig


def stream_misfits(algorithm: AlgorithmSettings, trainer: TrainerConfig, rollout: RolloutRole) -> Iterator[str]:
    """What does not go together, a line each."""
    stream = rollout.stream
    if stream is None:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} without rollout.stream, where rollout runs one step "
            "ahead at most; expected 0 or 1, or rollout.stream: {}"
        )
        return
    if algorithm.greedy_baseline and trainer.max_staleness:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} with rollout.stream and algorithm.name={algorithm.name}, "
            "whose baselines would be of newer weights than its samples; expected 0"
        )
    if stream.left_over == "carry" and not trainer.max_staleness:
        yield (
            "rollout.stream.left_over=carry with trainer.max_staleness=0: what a step leaves would be too old for the "
            "next; expected drop, or a max_staleness above 0"
        )
    if rollout.weights.rolling and not trainer.max_staleness:
        yield (
            "rollout.weights.rolling=true with trainer.max_staleness=0, where engines have nothing to generate while "
            "weights change; expected false, or a max_staleness above 0"
        )
    if rollout.lend and rollout.engine.release_weights:
        yield (
            "rollout.lend=true with rollout.engine.release_weights=true, whose memory goes and comes back for all "
            "engines at once; expected one of them"
        )
    if rollout.lend and stream.engine_restarts:
        yield (
            f"rollout.lend=true with rollout.stream.engine_restarts={stream.engine_restarts}, which was not tried: an "
            "engine may be lost while a model has its device; expected one of them"
        )
    if rollout.weights.rolling and rollout.engine.release_weights:
        yield (
            "rollout.weights.rolling=true with rollout.engine.release_weights=true, whose memory goes and comes back "
            "for all engines at once; expected one of them"
        )
