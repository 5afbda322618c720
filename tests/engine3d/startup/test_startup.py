"""The switch of all that only makes starts quicker."""

from __future__ import annotations

import gc
import sys

import pytest

from engine3d.startup import VARIABLE, jit_kernels, leave_out
from engine3d.startup.imports import quick_imports


def test_switched_off_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    monkeypatch.setattr(jit_kernels.subprocess, "Popen", lambda *_, **__: pytest.fail("compiles"))
    leave_out("package_that_is_not_there")
    assert "package_that_is_not_there" not in sys.modules
    with quick_imports():
        assert gc.isenabled()
    assert jit_kernels.start({"model_path": "/nowhere", "dtype": "bfloat16", "tp_size": 1}) is None


def test_what_is_left_out_is_absent_and_what_is_imported_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "package_that_is_left_out", None)
    del sys.modules["package_that_is_left_out"]
    leave_out("package_that_is_left_out", "gc")
    with pytest.raises(ModuleNotFoundError):
        import package_that_is_left_out  # type: ignore[import-not-found]  # noqa: F401
    assert sys.modules["gc"] is gc
