"""Libraries imported at their first use."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from engine3d.startup import lazy_imports

_FIRST_USE = """
import sys
from engine3d.startup.lazy_imports import LazyModule
library = LazyModule("fractions")
before = "fractions" in sys.modules
assert library.Fraction(1, 2) + library.Fraction(1, 2) == 1
print(before, "fractions" in sys.modules)
"""


def test_a_library_is_imported_at_its_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", _FIRST_USE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_names_are_those_of_the_library() -> None:
    assert lazy_imports.torch.Tensor is torch.Tensor
    assert lazy_imports.dist.ReduceOp is torch.distributed.ReduceOp
    assert pickle.loads(pickle.dumps(lazy_imports.torch)) is torch
    with pytest.raises(AttributeError, match="no attribute 'tensors'"):
        lazy_imports.torch.tensors  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        lazy_imports.LazyModule("no_such_library").name  # noqa: B018
