"""Settings of metrics: `metrics:` in a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from engine3d.errors import shortened
from engine3d.settings import LONGEST_S, Settings

Label = Annotated[str, Field(min_length=1, max_length=128)]


def _not_disabled(given: Any) -> Any:
    if given == "disabled":
        raise ValueError("'disabled', expected online or offline; metrics.wandb=false leaves Weights & Biases out")
    return given


class WandbConfig(Settings):
    """Weights & Biases, which is to be installed. `metrics.wandb: true` takes all defaults."""

    project: Label | None = None
    """Project of the run; that of the environment variable WANDB_PROJECT, or "hybridflow", if null."""
    entity: Label | None = None
    """Team or user; WANDB_ENTITY, or the user's default, if null."""
    tags: tuple[Label, ...] = ()
    """Tags of the run."""
    mode: Annotated[Literal["online", "offline"] | None, BeforeValidator(_not_disabled)] = None
    """Upload metrics while the run writes them, or keep them in its directory for `wandb sync`; WANDB_MODE, or
    "online", if null."""


class MlflowConfig(Settings):
    """MLflow, which is to be installed. `metrics.mlflow: true` takes all defaults."""

    tracking_uri: Label | None = None
    """Server or database, such as http://host:5000 or sqlite:///mlflow.db; MLFLOW_TRACKING_URI if null."""
    experiment: Label = "hybridflow"
    """Experiment of the run."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run, by name."""


class TrackioConfig(Settings):
    """trackio, which is to be installed. `metrics.trackio: true` takes all defaults."""

    project: Label = "hybridflow"
    """Project of the run."""
    space_id: Label | None = None
    """Space of the Hugging Face Hub that shows it, such as user/space; trackio's database on this machine if null."""


def _switched(given: Any) -> Any:
    """True stands for all defaults, false for none. Raises ValueError for a text."""
    if isinstance(given, str):
        raise ValueError(f"{shortened(given)!r}, expected true, false, or a mapping of its settings")
    return {True: {}, False: None}[given] if isinstance(given, bool) else given


class MetricsConfig(Settings):
    """Sinks of a run's metrics, and samples of its GPUs and texts."""

    console: bool = True
    """Print a line a step."""
    jsonl: bool = True
    """Write `metrics.jsonl`."""
    csv: bool = True
    """Write `metrics.csv`."""
    tensorboard: bool = True
    """Write event files for TensorBoard."""
    wandb: Annotated[WandbConfig | None, BeforeValidator(_switched)] = None
    mlflow: Annotated[MlflowConfig | None, BeforeValidator(_switched)] = None
    trackio: Annotated[TrackioConfig | None, BeforeValidator(_switched)] = None
    device_interval_s: float = Field(1.0, ge=0, le=LONGEST_S)
    """Seconds between two samples of each GPU's utilisation, memory, power and clock; 0 takes none."""
    samples_per_step: int = Field(4, ge=0)
    """Samples of each step that `samples.jsonl` and the report show as texts; 0 writes none."""
    sample_characters: int = Field(1000, ge=10)
    """Most characters of a prompt, a response or an answer there: what is longer loses its middle."""
