"""Libraries that are installed and cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.platform.cuda.cuda_platform import CudaPlatform
from hybridflow.cluster.devices.device_map import Device
from hybridflow.config.recipe import load_recipe
from hybridflow.planning import import_check
from hybridflow.planning.import_check import check_imports, first_failure, needed_modules
from tests.support.runs import DEMO

GPU, CPU = [Device(0, "cuda", 0)], [Device(0, "cpu", 0)]
FLASH = ("train.dtype=bfloat16", "train.megatron={attention_backend: flash}")


class Full(CudaPlatform):
    has_transformer_engine = True


def test_what_models_and_engines_need_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_check, "platform", Full())
    recipe, flash = load_recipe(DEMO), load_recipe(DEMO, FLASH)
    both, apart = {"actor": GPU, "rollout": GPU}, {"actor": GPU, "rollout": CPU}
    assert list(needed_modules(recipe, both, every=True)) == ["transformer_engine.pytorch", "sgl_kernel", "flashinfer"]
    assert list(needed_modules(flash, apart, every=True)) == ["transformer_engine.pytorch", "flash_attn.cute"]
    assert list(needed_modules(flash, both, every=False)) == ["flash_attn.cute"]
    assert needed_modules(recipe, both, every=False) == {}
    assert needed_modules(flash, {"actor": CPU, "rollout": CPU}, every=True) == {}


def test_an_installed_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that fails like FlashAttention 4 next to another version of what it is made of."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    for path in (package, package.parent):
        (path / "__init__.py").touch()
    (package / "__init__.py").write_text("raise ImportError('libcutlass.so: no such\\n file')\n")
    (tmp_path / "sound.py").write_text("print('[said on import]')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reason = "ImportError: libcutlass.so: no such file"
    (tmp_path / "torch.py").touch()  # without seconds of imports
    assert first_failure(("sound", "flash_attn.cute", "absent")) == ("flash_attn.cute", reason)

    monkeypatch.setattr(import_check, "platform", Full())
    monkeypatch.setattr(import_check, "first_failure", lambda modules: (modules[0], reason))
    with pytest.raises(UserError) as caught:
        check_imports(load_recipe(DEMO, FLASH), {"actor": GPU, "rollout": GPU}, every=False)
    assert str(caught.value) == (
        f"train.megatron.attention_backend=flash: flash_attn.cute cannot be imported here ({reason}); expected "
        "flash-attn-4 and nvidia-cutlass-dsl as in requirements.lock, or attention_backend=auto"
    )


def test_a_library_that_ends_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").touch()  # without seconds of imports
    (tmp_path / "sound.py").write_text("print('[said on import]')\n")
    (tmp_path / "fatal.py").write_text("import os\nos._exit(9)\n")
    assert first_failure(("sound",)) is None
    assert first_failure(("sound", "fatal")) == ("fatal", "the process that imports it ended with 9: nothing said")
