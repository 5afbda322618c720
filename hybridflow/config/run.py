"""Settings of the loop and of checkpoints: `trainer:`, `warmup:`, `checkpoint:`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from engine3d.errors import UserError
from engine3d.settings import MOST_SAMPLES, AbsolutePath, Settings
from engine3d.training.config import OptimizerConfig
from hybridflow.metrics.names import set_of

MOST_STEPS = 1_000_000_000


class WarmupConfig(Settings):
    """A supervised phase before the first rollout, on the data's supervised examples."""

    steps: int = Field(100, ge=1, le=MOST_STEPS)
    """Supervised updates before the first rollout."""
    batch_size: int = Field(64, ge=1, le=MOST_SAMPLES)
    """Examples of each."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)


class ProfileConfig(Settings):
    """Updates and rollouts of which a profiler trace is written: `profile/step-N-ROLE.json.gz` in the run's directory,
    by the first rank of every trained role.
    """

    steps: tuple[Annotated[int, Field(ge=1)], ...]
    """The trainer's steps, from 1, whose first update is traced."""
    micro_batches: int = Field(2, ge=1)
    """Micro-batches that are traced, forward and backward: from the second on, or from the first if there are no more.
    On virtual stages (`layout.vpp` above 1) all of the update are.
    """
    rollout_steps: int = Field(0, ge=0)
    """Steps of the first engine that are traced too, from the beginning of the rollout on: prefill or decode of all
    running requests. Every rank of the engine writes a trace into `profile/step-N-rollout/`.
    """

    @model_validator(mode="after")
    def _some_step(self) -> ProfileConfig:
        if not self.steps:
            raise ValueError("steps=[] traces nothing, expected at least one step; or no profile")
        return self


class TrainerConfig(Settings):
    """The loop."""

    steps: int = Field(100, ge=1, le=MOST_STEPS)
    """Steps of the run; null where `epochs_of_data` is set."""
    epochs_of_data: float | None = Field(None, gt=0, le=1e6)
    """Passes over the training prompts, in place of `steps`: as many steps as cover them."""
    prompts_per_step: int = Field(64, ge=1, le=MOST_SAMPLES)
    """Prompts of a step, each with `rollout.samples_per_prompt` responses."""
    mini_batches: int = Field(1, ge=1, le=MOST_SAMPLES)
    """Optimizer steps that one rollout is divided into."""
    epochs: int = Field(1, ge=1, le=MOST_STEPS)
    """Passes over each rollout."""
    max_staleness: int = Field(0, ge=0, le=1024)
    """Versions by which the weights that generated a sample may be older than those trained on it. At 1 the engines
    respond to the next step's prompts while the models are trained on this one's; they need devices of their own. Above
    1 only with `rollout.stream`.
    """
    async_evaluation: bool = False
    """Evaluate in the background: the engines respond to held-out prompts while the models make the next step, whose
    weights wait for the end of the evaluation. The engines need devices of their own."""
    export: bool = True
    """Write the trained model as a HuggingFace directory at the end."""
    profile: ProfileConfig | None = None
    """Write traces of some updates; none if null."""

    @model_validator(mode="before")
    @classmethod
    def _without_null_steps(cls, data: Any) -> Any:
        """`steps: null` takes away the steps of a base, for `epochs_of_data`."""
        if isinstance(data, Mapping) and data.get("epochs_of_data") is not None and data.get("steps", 0) is None:
            return {name: value for name, value in data.items() if name != "steps"}
        return data

    @model_validator(mode="after")
    def _one_length(self) -> TrainerConfig:
        if self.epochs_of_data is not None and "steps" in self.model_fields_set:
            raise ValueError(
                f"epochs_of_data={self.epochs_of_data:g} and steps={self.steps}, expected one of them; "
                "trainer.steps=null takes the steps of a base away"
            )
        if self.epochs_of_data is None:
            self.check_traced(self.steps)
        return self

    @model_serializer(mode="wrap")
    def _without_derived_steps(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        derived = "steps" if self.epochs_of_data is not None else ""
        return {name: value for name, value in serialize(self).items() if name != derived}

    @property
    def traced_rollout_steps(self) -> int:
        """Steps of the first engine that are traced in a step of `profile`."""
        return self.profile.rollout_steps if self.profile is not None else 0

    def profile_of(self, step: int) -> ProfileConfig | None:
        """Return the profile settings of a step; None if it is not traced."""
        return self.profile if self.profile is not None and step in self.profile.steps else None

    def check_traced(self, steps: int) -> None:
        """Raises ValueError where `profile` names a step that is not run."""
        if self.profile is not None and (last := max(self.profile.steps)) > steps:
            raise ValueError(f"profile.steps has step {last}, and steps={steps}; expected none after the last one")

    def for_prompts(self, count: int) -> TrainerConfig:
        """The same with the number of steps that `epochs_of_data` means for this number of training prompts.

        Raises:
            UserError: `profile` names a step beyond the last.
        """
        if self.epochs_of_data is None:
            return self
        steps = math.ceil(self.epochs_of_data * count / self.prompts_per_step)
        try:
            self.check_traced(steps)
        except ValueError as error:
            raise UserError(f"trainer: {error}") from None
        return self.model_copy(update={"steps": steps})

    @property
    def off_policy(self) -> bool:
        """True if a step may train on samples of older weights than those that the engines serve."""
        return self.max_staleness > 0

    @property
    def steps_in_flight(self) -> int:
        """Steps whose samples are generated at the same time, at most."""
        return self.max_staleness + 1

    @property
    def updates_per_step(self) -> int:
        return self.mini_batches * self.epochs


class BestConfig(Settings):
    """The checkpoint with the best value of a metric, which is never removed."""

    metric: str
    """Figure of a set in `evaluation`, such as `eval/NAME/pass@1`, or `eval/accuracy` of the set `eval`; of checkpoints
    of steps at which it was measured."""
    mode: Literal["max", "min"] = "max"
    """Direction of better values: larger or smaller."""

    @field_validator("metric", mode="after")
    @classmethod
    def _is_of_a_set(cls, metric: str) -> str:
        if set_of(metric) is None:
            raise ValueError(f"{metric!r} is no figure of a set in evaluation, expected such as eval/NAME/pass@1")
        return metric

    @property
    def set_name(self) -> str:
        """Name of the set."""
        return self.set_and_figure[0]

    @property
    def set_and_figure(self) -> tuple[str, str]:
        """The set, and the figure of it."""
        set_and_figure = set_of(self.metric)
        assert set_and_figure is not None
        return set_and_figure

    def is_better(self, value: float, than: float) -> bool:
        """True if a value is better than an earlier one."""
        return value > than if self.mode == "max" else value < than


class CheckpointConfig(Settings):
    """Checkpoints of a run, from which it can be resumed."""

    save_interval: int | None = Field(None, ge=1)
    """Steps between checkpoints; there is one after the last step and one after the warm-up too. None if null."""
    keep_last_k: int | None = Field(None, ge=1)
    """Checkpoints to keep: the oldest is removed once a new one is complete. All of them if null."""
    keep_best: BestConfig | None = None
    """Keep the checkpoint with the best value of a metric too; none for its value if null."""
    async_save: bool = True
    """Write in the background: training continues as soon as the state has been copied to host memory."""
    dir: AbsolutePath | None = None
    """Directory of the checkpoints; in the run's directory if null."""
    on_stop_s: float | None = Field(None, gt=0)
    """Time to save a checkpoint in after SIGTERM or SIGINT, before the run ends: of the previous step during a rollout,
    else of the step in progress. A signal ends the run at once if null.
    """
    on_failure: Literal["continue", "stop"] = "continue"
    """Effect of a failed save on the run."""
    verify: bool = True
    """Compare every file section that a resumed run reads with its checksum."""
    accept: tuple[str, ...] = ()
    """Settings in which a resumed run may contradict its checkpoint, such as seed, tokenizer or data.arithmetic."""

    @model_validator(mode="after")
    def _saves_on_stop(self) -> CheckpointConfig:
        if self.on_stop_s is not None and self.save_interval is None:
            raise ValueError(
                f"on_stop_s={self.on_stop_s:g} in a run that saves nothing, expected save_interval too: a large one "
                "saves then and at the end alone"
            )
        if self.keep_best is not None and self.save_interval is None:
            raise ValueError(
                f"keep_best of {self.keep_best.metric} in a run that saves nothing, expected save_interval too"
            )
        return self

    @property
    def saves_in_background(self) -> bool:
        return self.save_interval is not None and self.async_save
