"""The base of every settings class of the project."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings: unknown keys are refused, each setting has one default at most."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
