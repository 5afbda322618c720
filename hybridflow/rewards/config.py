"""Settings of the rewards."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from engine3d.settings import Settings
from hybridflow.rewards.builtin import BUILTIN_REWARDS


class RewardFunctionConfig(Settings):
    """One reward function."""

    name: str = Field(min_length=1)
    """Names the reward in metrics and errors."""
    path: str
    """A builtin ("arithmetic"), "package.module:function", or "some/file.py:function"."""
    weight: float = 1.0
    """The reward of a sample is the weighted sum over all functions."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Limit of one call, for all samples of a step together, in seconds."""
    load_timeout_s: float = Field(default=120.0, gt=0)
    """Limit of the import of the module, in seconds."""

    @property
    def builtin(self) -> bool:
        """Whether `path` names a function of this project."""
        return self.path in BUILTIN_REWARDS

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        module, _, function = path.rpartition(":")
        if path not in BUILTIN_REWARDS and not (module and function.isidentifier()):
            names = ", ".join(map(repr, BUILTIN_REWARDS))
            raise ValueError(f"{path!r} is no reward, expected 'module:function', 'file.py:function' or one of {names}")
        return path


class RewardConfig(Settings):
    """The reward functions of a run."""

    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="arithmetic", path="arithmetic"),)

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        names = [function.name for function in self.functions]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"functions are named {names}, expected at least one, each name once")
        return self
