"""Where metrics are written: `metrics:` in a recipe."""

from __future__ import annotations

from pydantic import Field

from engine3d.settings import LONGEST_S, Settings


class MetricsConfig(Settings):
    """Which sinks a run writes to, and what it watches."""

    console: bool = True
    """Print a line a step."""
    jsonl: bool = True
    """Write `metrics.jsonl`."""
    csv: bool = True
    """Write `metrics.csv`."""
    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb: bool = False
    """Weights & Biases, which is to be installed; kept on this machine unless WANDB_MODE says otherwise."""
    device_interval_s: float = Field(1.0, ge=0, le=LONGEST_S)
    """Seconds between two samples of each GPU's utilisation, memory, power and clock; 0 takes none."""
    samples_per_step: int = Field(4, ge=0)
    """Samples of each step and each evaluation that `samples.jsonl` and the report show as texts; 0 writes none."""
    sample_characters: int = Field(1000, ge=10)
    """Most characters of a prompt, a response or an answer there: what is longer loses its middle."""
