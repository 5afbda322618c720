"""Libraries imported at their first use."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
import torch

from engine3d.startup import VARIABLE, lazy_imports

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
        lazy_imports.torch.tensors  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        lazy_imports.LazyModule("no_such_library").name  # noqa: B018


_LATER_NAMES = """
import sys
import engine3d.serving
before = "engine3d.serving.config" in sys.modules
assert engine3d.serving.ServerConfig.__module__ == "engine3d.serving.config"
try:
    engine3d.serving.Server
except AttributeError as error:
    print(before, error)
"""


@pytest.mark.slow
def test_names_of_a_package_are_imported_at_their_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", _LATER_NAMES], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False module 'engine3d.serving' has no attribute 'Server'"


_LATER_FUNCTION = """
import sys
from engine3d.startup.lazy_imports import functions_later
with functions_later("colorsys", "rgb_to_hsv"):
    from colorsys import rgb_to_hsv
before = "colorsys" in sys.modules
white = rgb_to_hsv(1.0, 1.0, b=1.0)
import colorsys
assert white == colorsys.rgb_to_hsv(1.0, 1.0, 1.0)
with functions_later("colorsys", "rgb_to_hsv"):
    from colorsys import hsv_to_rgb
print(before, hsv_to_rgb is colorsys.hsv_to_rgb)
"""


@pytest.mark.parametrize("quick", ["1", "0"])
def test_a_module_of_functions_is_imported_when_one_is_called(quick: str) -> None:
    command, environment = [sys.executable, "-c", _LATER_FUNCTION], os.environ | {VARIABLE: quick}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [str(quick == "0"), "True"]
