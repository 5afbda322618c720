"""Imports without needless work, which takes a fifth of each process's start."""

from __future__ import annotations

import gc
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from engine3d.startup import is_on

_find_all = importlib.metadata.packages_distributions


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import in the block without garbage collection and without a scan of all installed packages.

    Imported objects stay, so that the collector would traverse them again and again; it leaves them out afterwards too.
    transformers asks for the files of every installed distribution, to find a few versions.
    """
    if not (is_on() and gc.isenabled()):
        yield
        return
    before = len(sys.modules)
    gc.disable()
    importlib.metadata.packages_distributions = _Distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = _find_all
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()


class _Distributions(Mapping[str, list[str]]):
    """Replacement of `importlib.metadata.packages_distributions()` that looks up one distribution without a scan.

    Most packages have a distribution of the same name, which is looked up first.
    """

    def __getitem__(self, package: str) -> list[str]:
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return self._all[package]
        return [package]

    def get(self, package: str, default: Any = None) -> Any:
        return self._all.get(package, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _find_all()
