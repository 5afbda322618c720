"""Libraries imported at their first use, for modules whose settings are read without them.

`from engine3d.startup.lazy_imports import torch` stands for `import torch`, `dist` for `torch.distributed`, and `pa`
for `pyarrow`. Their names serve in functions and annotations. A module that needs one while it is imported itself, as
a base class or a default, imports the library.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine3d.startup import is_on

if TYPE_CHECKING:
    import pyarrow as pa
    import torch as torch
    import torch.distributed as dist


class LazyModule(ModuleType):
    """Placeholder of a module that is imported when one of its names is accessed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


def attributes_later(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package that imports its modules when their names are accessed.

    Args:
        package: its complete name.
        modules: the module in the package that has each name.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


@contextmanager
def functions_later(module: str, *names: str) -> Iterator[None]:
    """Replace functions of a module by ones that import it when they are called, for imports in the block.

    Args:
        module: its complete name.
        names: of the functions, all that the block imports of it.
    """
    if module in sys.modules or not is_on():
        yield
        return
    stand_in = ModuleType(module)
    for name in names:
        setattr(stand_in, name, partial(_call, module, name))
    sys.modules[module] = stand_in
    try:
        yield
    finally:
        del sys.modules[module]


def _call(module: str, name: str, *arguments: Any, **named: Any) -> Any:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function(*arguments, **named)


if not TYPE_CHECKING:
    pa, torch, dist = map(LazyModule, ("pyarrow", "torch", "torch.distributed"))
