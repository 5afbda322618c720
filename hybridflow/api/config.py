"""The few settings that most runs change; a recipe has all others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from engine3d.errors import UserError, shortened
from engine3d.settings import MOST_SAMPLES, Settings
from hybridflow.algorithms.registry import known
from hybridflow.cluster.devices.device_map import DeviceMap
from hybridflow.config.reading.error_messages import describe_errors
from hybridflow.config.reading.known_names import API_NAMES
from hybridflow.config.reading.yaml_loader import SettingsError


def _device_map(value: Any) -> Any:
    """The device map in {"model": "cuda:0-3"}, or one that stands alone."""
    if isinstance(value, Mapping):
        if list(value) != ["model"]:
            raise ValueError(f'{dict(value)!r}, expected a device map such as {{"model": "cuda:0-3"}} or "cuda:0-3"')
        value = value["model"]
    if isinstance(value, str):
        try:
            DeviceMap.parse(value)
        except UserError as error:
            raise ValueError(str(error)) from None
    return value


DeviceMapping = Annotated[str | None, BeforeValidator(_device_map)]
"""A device map such as "cuda:0-3", as it is or as {"model": "cuda:0-3"}."""


class PPOConfig(Settings):
    """Settings of PPO, and of the other algorithms.

    What is given here comes before what the recipe says, and that before the defaults.

    Raises:
        SettingsError: one line for every setting that is wrong.
    """

    other_names = API_NAMES

    batch_size: int = Field(128, ge=1, le=MOST_SAMPLES)
    """Prompts of a step."""
    mini_batch_size: int = Field(16, ge=1, le=MOST_SAMPLES)
    """Prompts of an optimizer step. It divides `batch_size`. If not given, `batch_size` where the algorithm takes no
    second step from a rollout (gpg, opo)."""
    epochs: int = Field(1, ge=1)
    """Passes over the rollouts of a step."""
    lr: float = Field(1.5e-5, gt=0)
    """Learning rate of the actor, and of a critic that the recipe has no settings of its own for."""
    kl_coef: float = Field(0.1, ge=0)
    """Weight of the KL divergence from the initial model; 0 needs no reference policy."""
    max_steps: int = Field(100, ge=1)
    """Steps of a run."""
    algorithm: Annotated[str, AfterValidator(known)] = "ppo"
    """Its name: "grpo", "ppo" or any other of `registry.ALGORITHMS`."""
    samples_per_prompt: int | None = Field(None, ge=1)
    """Responses to each prompt; if not given, 8 where the algorithm compares them, as grpo does, else 1."""
    max_new_tokens: int = Field(1024, ge=1)
    """Most tokens of a response."""
    reward_options: dict[str, Any] = Field(default_factory=dict)
    """Further settings of `reward_fn`, as a recipe has them: workers, timeout_s, on_failure and so on."""
    actor_device_mapping: DeviceMapping = None
    """Devices of the actor; if not given, all GPUs, or one CPU slot where there is none."""
    rollout_device_mapping: DeviceMapping = None
    """Devices of the engines; those of the actor if not given."""
    critic_device_mapping: DeviceMapping = None
    """Devices of the critic; those of the actor if not given."""
    reward_device_mapping: DeviceMapping = None
    """Devices of the reward model, or of the reward functions if there is none."""
    async_rollout: bool = False
    """Generate while models are trained (`rollout.stream`), with weights a version older at most unless `recipe` has
    another `trainer.max_staleness`. The engines need a `rollout_device_mapping` of their own.
    """
    use_dynamic_batching: bool = False
    """Adapt the requests in flight at each engine to the free capacity of its KV cache
    (`rollout.stream.dynamic_batching`); needs `async_rollout`. Micro-batches are always filled by tokens.
    """
    adaptive_sampling: list[dict[str, Any]] | None = None
    """Sampling settings by the length of the prompt: rows of a recipe's `rollout.adaptive_sampling`, such as
    {"prompt_tokens": 512, "max_new_tokens": 2048}.
    """
    checkpoint_config: dict[str, Any] | None = None
    """Settings of a recipe's `checkpoint`: save_interval, keep_last_k, async_save and so on."""
    recipe: Path | dict[str, Any] | None = None
    """All other settings: a recipe file, or its content as a mapping."""

    def __init__(self, *unnamed: object, **settings: Any) -> None:
        if unnamed:
            given = shortened(repr(unnamed[0]))
            raise SettingsError([f"{type(self).__name__}({given}): expected settings by name, such as recipe={given}"])
        try:
            super().__init__(**settings)
        except ValidationError as error:
            from hybridflow.config.recipe import Recipe  # only here: it imports what a light import does without

            name = type(self).__name__
            raise SettingsError(describe_errors(type(self), settings, error, {}, name, Recipe)) from None

    @model_validator(mode="after")
    def _whole_mini_batches(self) -> PPOConfig:
        if self.recipe is not None:  # which may have sizes of its own
            return self
        if self.batch_size % self.mini_batch_size and "mini_batch_size" not in self.model_fields_set:
            from hybridflow.algorithms.config import load  # only here: it imports what a light import does without

            if load(self.algorithm).settings.on_policy:  # one mini-batch of all
                return self
        mini_batches(self.batch_size, self.mini_batch_size)
        return self


TrainerConfig = PPOConfig
"""The same settings under the name that guides give them where they map roles to devices."""


def get_ppo_config(*unnamed: object, **settings: Any) -> PPOConfig:
    """A `PPOConfig` of the defaults but for what is given by name."""
    return PPOConfig(*unnamed, **settings)


def mini_batches(batch_size: int, mini_batch_size: int) -> int:
    """Return the number of mini-batches of a batch.

    Raises:
        ValueError: they are not of one size.
    """
    if batch_size % mini_batch_size:
        near = max(size for size in range(1, mini_batch_size) if batch_size % size == 0)
        raise ValueError(
            f"mini_batch_size={mini_batch_size} does not divide batch_size={batch_size}; "
            f"expected such as mini_batch_size={near}"
        )
    return batch_size // mini_batch_size
