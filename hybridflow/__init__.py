"""HybridFlow: reinforcement learning of language models as a dataflow of roles, each with its own parallel layout.

The names of the public API are imported when they are first used: `import hybridflow` alone brings in nothing large.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import sys
from typing import TYPE_CHECKING, Any

__all__ = [
    "DataFlow",
    "PPOConfig",
    "PPOTrainer",
    "RLTrainer",
    "RolloutBatch",
    "Stage",
    "TrainerConfig",
    "__version__",
    "get_ppo_config",
    "is_flash_attn_available",
]

if TYPE_CHECKING:
    from hybridflow.api.config import PPOConfig, TrainerConfig, get_ppo_config
    from hybridflow.api.dataflow import DataFlow, Stage
    from hybridflow.api.libraries import is_flash_attn_available
    from hybridflow.api.ppo_trainer import PPOTrainer
    from hybridflow.api.rl_trainer import RLTrainer
    from hybridflow.api.rollout_batch import RolloutBatch

    __version__: str

_MODULES = {
    "DataFlow": "hybridflow.api.dataflow",
    "PPOConfig": "hybridflow.api.config",
    "PPOTrainer": "hybridflow.api.ppo_trainer",
    "RLTrainer": "hybridflow.api.rl_trainer",
    "RolloutBatch": "hybridflow.api.rollout_batch",
    "Stage": "hybridflow.api.dataflow",
    "TrainerConfig": "hybridflow.api.config",
    "get_ppo_config": "hybridflow.api.config",
    "is_flash_attn_available": "hybridflow.api.libraries",
}

# Read by Ray when it is imported, whichever module does that first. What Ray would print about workers that died is
# dropped: a `WorkerGroup` says which one it was and why, in one line.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")
# A Ray of one host listens on the loopback interface alone. One of several gets its address explicitly.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# A call without a Ray, as of a thread that waits while a run ends, would start one that asks nobody for a token.
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")


_API = f"its API is {', '.join(name for name in __all__ if name != '__version__')}"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("hybridflow")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    from hybridflow.config.reading.known_names import import_text

    raise AttributeError(f"module 'hybridflow' has no attribute {name!r}: {import_text(name) or _API}")


class _OtherSystemsModules:
    """Says of a module or a name that is not there what it is here. Stands behind all that find modules.

    Python looks for a module also where a package lacks the name of a `from` import. An error with that module's name
    would be lost there; one without a name would be a traceback of `python -m`.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if not name.startswith("hybridflow."):
            return
        last = name.rpartition(".")[2]
        if last.startswith("_"):
            raise ModuleNotFoundError(f"there is no {name}", name=name)
        from hybridflow.config.reading.known_names import import_text

        text = f"here it is from hybridflow import {last}" if last in __all__ else None
        text = text or import_text(name.removeprefix("hybridflow."))
        near = difflib.get_close_matches(last, __all__, n=1, cutoff=0.8)
        text = text or (f"did you mean from hybridflow import {near[0]}?" if near else None)
        text = text or f"import from hybridflow itself; {_API}"
        raise ModuleNotFoundError(f"there is no {name}: {text}", name="hybridflow")


if _OtherSystemsModules not in sys.meta_path:
    sys.meta_path.append(_OtherSystemsModules)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
