"""The single controller: set-up of a run, start of its roles, the loop, a step, evaluation, transfers of weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Never

from engine3d.errors import UserError


def init_distributed(*_: object, **__: object) -> Never:
    """Raises UserError: it is a method of a trainer."""
    raise UserError(
        "hybridflow.trainer.init_distributed is a method of a trainer, expected PPOTrainer(config, model=..., "
        "reward_fn=..., prompts=...).init_distributed(); without it the first rollout() starts the roles"
    )


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The trainers of the Python API, which guides import from here: `from hybridflow.trainer import RLTrainer`."""
        if name[:1].isupper():
            return getattr(importlib.import_module("hybridflow"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
