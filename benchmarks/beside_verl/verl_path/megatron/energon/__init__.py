"""Empty stand-in for megatron-energon, which Megatron-Bridge imports for multimodal data.

Any name in it or in a module below it is a class without behaviour.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _StandIn:
    def __init__(self, *arguments: Any, **settings: Any) -> None: ...

    def __class_getitem__(cls, item: Any) -> type[_StandIn]:
        return cls


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = __getattr__


def __getattr__(name: str) -> type[_StandIn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_StandIn,), {})


sys.meta_path.insert(0, _Finder())
