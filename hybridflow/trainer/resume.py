"""Draws of a resumed run: none that was trained on is repeated, and none that was drawn is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.checkpoint.driver_state import RunState
from hybridflow.checkpoint.resume import Resumption
from hybridflow.data.sampler import PromptSampler, unpacked_returned
from hybridflow.environments.config import OF_EPISODES
from hybridflow.rollout.buffered_groups import BufferedGroups
from hybridflow.rollout.rollouts import RolloutSnapshot
from hybridflow.rollout.source import RolloutSource

_OF_SAMPLES = (
    "rollout.sampling",
    "rollout.samples_per_prompt",
    "rollout.adaptive_sampling",
    *(f"environment.{name}" for name in (*sorted(OF_EPISODES), "credit", "turn_discount")),
)
"""Settings by which samples are drawn: with others they have other lengths, log-probs or group sizes."""
_OF_SCORES = ("reward", "cost", "judge")
"""Settings by which samples are scored."""


@dataclass(frozen=True)
class ResumedDraws:
    """Draws that a run resumes with.

    Args:
        snapshot: state of the source of rollouts.
        notes: lines on what is drawn again or lost, and why.
    """

    snapshot: RolloutSnapshot
    notes: tuple[str, ...] = ()

    @property
    def ahead(self) -> list[int]:
        """Numbers of the draws that were made and that no step has trained on."""
        groups, order = self.snapshot.groups, self.snapshot.order
        return [*(groups.draws if groups is not None else ()), *(number for number, _ in unpacked_returned(order))]


def resumed_draws(
    settings: Mapping[str, Any],
    sampler: PromptSampler,
    source: RolloutSource,
    resumption: Resumption,
    state: RunState,
) -> ResumedDraws:
    """The draws of a checkpoint, as far as the run has a use for them.

    Prompts whose samples are dropped are the first to be drawn again. So no draw that was trained on is repeated,
    although a stream trains on draws in another order than they were made in. Other prompts, or other orders of them,
    share no identity with what was drawn: their order begins after as many draws as were trained on.

    Args:
        settings: of the resumed run: `public_settings` of its recipe.
        sampler: of its training prompts, in any state.
        source: of its rollouts.
        resumption: with the recipe of the checkpoint, and what `checkpoint.accept` took.
        state: of the checkpoint.
    """
    groups, order, reason = state.groups, state.sampler, None
    if groups is not None and (reason := _unusable(settings, source, resumption, groups)):
        groups = None
    drawn = state.groups.draws if state.groups is not None else {}
    dropped = {} if groups is not None else drawn
    if resumption.has_same_prompts and sampler.is_of(order):
        note = f"resume: {len(dropped)} prompts that were drawn ahead are drawn again first: {reason}"
        order = sampler.with_returned(order, dropped)
        return ResumedDraws(RolloutSnapshot(order, state.samples_drawn, groups), (note,) if dropped else ())
    lost = len(dropped) + len(unpacked_returned(order))
    position = int(order["position"]) - lost
    repeated = position % int(order["count"])
    names = ", ".join(resumption.accepted) or "data"
    note = (
        f"resume: other prompts or another order of them ({names}): draws continue after {position}. Up to {repeated} "
        f"prompts of this epoch may be drawn again. {lost} that were drawn ahead are dropped."
    )
    return ResumedDraws(RolloutSnapshot(sampler.forwarded(position), state.samples_drawn, groups), (note,))


def _unusable(
    settings: Mapping[str, Any], source: RolloutSource, resumption: Resumption, groups: BufferedGroups
) -> str | None:
    """Reason for which samples that were drawn ahead cannot be trained on; None if they can."""
    if resumption.accepted:
        return f"checkpoint.accept has {', '.join(resumption.accepted)}"
    if (reason := source.unusable(groups)) is not None:
        return reason
    names = (*_OF_SAMPLES, *(_OF_SCORES if source.scored_as_they_end else ()))
    saved = resumption.manifest.recipe
    if saved and (changed := _changed(saved, settings, names)):
        return f"{', '.join(changed)} changed"
    if source.scored_as_they_end and resumption.changed_code:
        return f"{', '.join(resumption.changed_code)} changed"
    return None


def _changed(saved: Mapping[str, Any], given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Dotted settings that differ."""

    def value(settings: Any, name: str) -> Any:
        for key in name.split("."):
            settings = settings.get(key) if isinstance(settings, Mapping) else None
        return settings

    # A setting that is not set may be absent, null or an empty list.
    return [name for name in names if (value(saved, name) or None) != (value(given, name) or None)]
