"""Libraries imported at their first use, for modules whose settings are read without them.

`from engine3d.startup.lazy_imports import torch` stands for `import torch`, and `dist` for `torch.distributed`. Their
names serve in functions and annotations. A module that needs one while it is imported itself, as a base class or a
default, imports the library.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    import torch.distributed as dist


class LazyModule(ModuleType):
    """A module in the place of another, which is imported when one of its names is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


if not TYPE_CHECKING:
    torch, dist = LazyModule("torch"), LazyModule("torch.distributed")
