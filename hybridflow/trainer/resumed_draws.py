"""Prompts of a resumed run: none that was trained on is drawn again, and none that was drawn is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.checkpoint.driver_state import RunState, drawn_ahead
from hybridflow.checkpoint.resume import Resumption
from hybridflow.config.recipe import Recipe
from hybridflow.config.yaml_loader import public_settings
from hybridflow.data.sampler import PromptSampler, unpacked_returned
from hybridflow.rollout.held_stream import HeldStream

_OF_SAMPLES = ("rollout.sampling", "rollout.samples_per_prompt")
"""Settings by which samples are drawn: those of before have other lengths, log-probs or group sizes."""
_OF_STREAMS = (*_OF_SAMPLES, "reward", "cost")
"""Settings as `_OF_SAMPLES`, of a stream, whose samples are scored as they end."""


@dataclass(frozen=True)
class ResumedDraws:
    """Draws that a run resumes with.

    Args:
        order: state of the sampler of prompts.
        held: rollouts that were made ahead.
        stream: groups that a stream had begun or returned.
        notes: lines on what is drawn again or lost, and why.
    """

    order: dict[str, Any]
    held: tuple[SampleBatch, ...]
    stream: HeldStream | None
    notes: tuple[str, ...] = ()

    @property
    def ahead(self) -> list[int]:
        """Identities of the draws that were made and that no step has trained on."""
        return [*drawn_ahead(self.held, self.stream), *(number for number, _ in unpacked_returned(self.order))]


def resumed_draws(recipe: Recipe, sampler: PromptSampler, resumption: Resumption, state: RunState) -> ResumedDraws:
    """The draws of a checkpoint, as far as the recipe has a use for them.

    Prompts whose samples are dropped are the first to be drawn again. So no draw that was trained on is repeated,
    although a stream trains on draws in another order than they were made in. Other prompts, or other orders of them,
    share no identity with what was drawn: their order begins after as many draws as were trained on.

    Args:
        recipe: of the resumed run.
        sampler: of its training prompts, in any state.
        resumption: with the recipe of the checkpoint, and what `checkpoint.accept` took.
        state: of the checkpoint.
    """
    held, stream, order, reasons = state.buffer, state.stream, state.sampler, dict[str, None]()
    if held and (reason := _useless(recipe, resumption, held)):
        reasons[reason], held = None, ()
    if stream is not None and (reason := _useless(recipe, resumption, stream)):
        reasons[reason], stream = None, None
    kept = drawn_ahead(held, stream)
    dropped = {
        number: prompt for number, prompt in drawn_ahead(state.buffer, state.stream).items() if number not in kept
    }
    if resumption.has_same_prompts and sampler.is_of(order):
        note = f"resume: {len(dropped)} prompts that were drawn ahead are drawn again first: {'; '.join(reasons)}"
        return ResumedDraws(sampler.with_returned(order, dropped), held, stream, (note,) if dropped else ())
    lost = len(dropped) + len(unpacked_returned(order))
    position = int(order["position"]) - lost
    repeated = position % int(order["count"])
    names = ", ".join(resumption.accepted) or "data"
    note = (
        f"resume: other prompts or another order of them ({names}): draws continue after {position}. Up to {repeated} "
        f"prompts of this epoch may be drawn again. {lost} that were drawn ahead are dropped."
    )
    return ResumedDraws(sampler.forwarded(position), held, stream, (note,))


def _useless(recipe: Recipe, resumption: Resumption, drawn: Sequence[SampleBatch] | HeldStream) -> str | None:
    """Why samples that were drawn ahead cannot be trained on; None if they can."""
    of_stream = isinstance(drawn, HeldStream)
    if resumption.accepted:
        return f"checkpoint.accept has {', '.join(resumption.accepted)}"
    if of_stream != (recipe.rollout.stream is not None):
        return "rollout.stream is null now" if of_stream else "rollout.stream is set now"
    if not of_stream and not recipe.trainer.max_staleness:
        return "trainer.max_staleness is 0"
    saved = resumption.manifest.recipe
    if saved and (changed := _changed(saved, public_settings(recipe), _OF_STREAMS if of_stream else _OF_SAMPLES)):
        return f"{', '.join(changed)} changed"
    return None


def _changed(saved: Mapping[str, Any], given: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Dotted settings that differ."""

    def value(settings: Any, name: str) -> Any:
        for key in name.split("."):
            settings = settings.get(key) if isinstance(settings, Mapping) else None
        return settings

    return [name for name in names if value(saved, name) != value(given, name)]
