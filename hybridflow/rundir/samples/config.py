"""Settings of the stored samples of a run: `samples:`."""

from __future__ import annotations

from pydantic import Field, model_validator

from engine3d.settings import Settings


class SamplesConfig(Settings):
    """Storage of the samples that were trained on: Parquet files in `samples/` of the run's directory."""

    store: bool = True
    """Keep every sample that was trained on, with its tokens, log-probs, versions and rewards."""
    keep_mb: int | None = Field(1000, ge=1)
    """Megabytes (1e6 bytes) that they may take: the oldest steps go first, never the newest. All of them stay if
    null."""
    events: bool = True
    """Write `events.jsonl`: the decisions on which samples each step trained on, and digests of its weights, which
    `hybridflow replay` compares.
    """

    @model_validator(mode="after")
    def _keeps_what_is_stored(self) -> SamplesConfig:
        if not self.store and self.keep_mb != type(self).model_fields["keep_mb"].default:
            given = "null" if self.keep_mb is None else self.keep_mb
            raise ValueError(f"keep_mb={given} with store=false, which keeps nothing; expected store=true")
        return self
