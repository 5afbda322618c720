"""Whether a run's sample store has room for what a step learns from."""

from __future__ import annotations

from hybridflow.config.recipe import Recipe

_TOKEN_BYTES = 5
"""On the disk, of a response token: measured with random ids out of 150,000 and random log-probs, the least that can be
compressed."""
_MB = 1_000_000


def store_notes(recipe: Recipe, sequence_tokens: int) -> list[str]:
    """A line where the samples of one step may take more than the store is to keep.

    It is no error: responses may be far shorter than the longest, and the newest step stays in any case.

    Args:
        recipe: the run.
        sequence_tokens: of the longest prompt with its response.
    """
    keep_mb = recipe.samples.keep_mb
    samples = recipe.samples_per_step
    most = samples * sequence_tokens * _TOKEN_BYTES
    if not recipe.samples.store or keep_mb is None or most <= keep_mb * _MB:
        return []
    return [
        f"samples.keep_mb={keep_mb}: {samples:,} samples of up to {sequence_tokens:,} tokens may take "
        f"{most / _MB:,.0f} MB, and then only those of the newest step are kept"
    ]
