"""Settings of a correction: `algorithm.correction` of a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from engine3d.settings import Settings

Level = Literal["token", "sequence", "geometric"]
"""Scope of a probability ratio: each token, the product over a response's tokens, or their geometric mean."""

_TRUNCATE = 2.0


class CorrectionSettings(Settings):
    """Correction of the loss for tokens drawn from another policy: the engine's numerics, or older weights.

    All is of the ratio of the probability by the trainer, before the step's first update, to that by the engine which
    drew the token.
    """

    against: Literal["proximal", "rollout"] = "proximal"
    """Denominator of the loss's ratio: "proximal", the trainer's policy before the step's first update, with weights
    that correct from the engine's policy to it (decoupled PPO); or the engine's own log-probs, which need no weights.
    """
    weights: Level | None = None
    """The importance weight of a token's policy loss: its own ratio, its response's, or the geometric mean of its
    response's. 1 if null."""
    truncate: float | None = Field(default=None, ge=1)
    """A weight above this counts as this; null leaves all. If not set: 2.0 with weights and without a mask."""
    mask: Level | None = None
    """Leave out tokens, or whole responses, whose ratio of this level is below mask_low or above mask_high."""
    mask_low: float | None = Field(default=None, ge=0, lt=1)
    """Needed by mask; 0 for no lower bound."""
    mask_high: float | None = Field(default=None, gt=1)
    """Needed by mask."""
    veto: float | None = Field(default=None, gt=0, lt=1)
    """Leave out responses with a token whose own ratio is below this."""

    @model_validator(mode="before")
    @classmethod
    def _dependent_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("weights") is None or data.get("mask") is not None:
            return data
        return {"truncate": _TRUNCATE, **data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if errors := list(self._errors()):
            raise ValueError("; ".join(errors))
        return self

    def _errors(self) -> Iterator[str]:
        if self.against == "rollout" and self.weights is not None:
            yield (
                f"weights is {self.weights!r} with against 'rollout', where the ratio of the loss is to the engine's "
                "log-probs and would count twice; expected against 'proximal', or no weights"
            )
        if self.truncate is not None and self.weights is None:
            yield f"truncate is {self.truncate:g} without weights, expected weights, or no truncate"
        bounds = {"mask_low": self.mask_low, "mask_high": self.mask_high}
        if self.mask is None:
            for name, bound in bounds.items():
                if bound is not None:
                    yield f"{name} is {bound:g} without mask, expected mask, or no {name}"
        elif missing := [name for name, bound in bounds.items() if bound is None]:
            yield f"mask is {self.mask!r} without {' and '.join(missing)}, expected both bounds"
        elif self.truncate is not None and self.mask == self.weights and self.truncate >= (self.mask_high or 0):
            yield (
                f"truncate is {self.truncate:g}, which no weight reaches that mask_high {self.mask_high:g} leaves; "
                "expected less, or no truncate"
            )

    @property
    def leaves_out(self) -> bool:
        """True if tokens may be left out of the loss."""
        return self.mask is not None or self.veto is not None

    @property
    def needs_proximal(self) -> bool:
        """True if the trainer's log-probs before the first update are needed."""
        return self.against == "proximal" or self.leaves_out

    @property
    def corrects(self) -> bool:
        """True if the loss accounts for the difference. Otherwise it is only measured."""
        return self.against == "rollout" or self.weights is not None or self.leaves_out
