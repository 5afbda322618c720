"""Findings of `hybridflow check` where the platform and NVML are made up, and libraries that cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine3d.errors import UserError
from engine3d.platform.cuda.cuda_platform import CudaPlatform
from hybridflow.cli.main import main
from hybridflow.cluster.devices import nvml
from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.devices.nvml import MakeReader
from hybridflow.config.evaluation_recipe import EvaluationRecipe
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks import gpu as gpu_check
from hybridflow.planning.checks import model as model_check
from hybridflow.planning.checks import placement as placement_check
from hybridflow.planning.checks import recipe as recipe_check
from hybridflow.planning.checks.gpu import (
    check_imports,
    check_rollout_libraries,
    first_failure,
    needed_modules,
    used_gpus,
)
from hybridflow.planning.data.evaluation_plan import check_evaluation_alone
from hybridflow.planning.memory import estimate as memory_estimate
from tests.support.fake_devices import Absent, Ampere, Blackwell, Small, Steady, Taken
from tests.support.runs import DEMO

RECIPES = Path(__file__).parents[4] / "launch" / "recipes"
ONE_GPU = str(RECIPES / "h200-1gpu.yaml")
FEW_PROMPTS = ("data.arithmetic.train_size=512", "data.arithmetic.sft_size=512")
NODES = ("--nodes", "1", "--gpus-per-node", "1")
FIRST = {"rollout": [Device(0, "cuda", 0)]}


class FourGpus(CudaPlatform):
    """A machine of four GPUs without Transformer Engine."""

    has_transformer_engine = False

    @property
    def gpus(self) -> int:
        return 4


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has GPUs, of which nobody uses any."""
    for module in (model_check, placement_check, gpu_check):
        monkeypatch.setattr(module, "platform", FourGpus())
    monkeypatch.setattr(gpu_check, "first_failure", lambda modules: None)
    # No engine may be asked: this is to be quick.
    monkeypatch.setattr(memory_estimate, "serving_by_rank", lambda *_: pytest.fail("SGLang was imported"))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # kept from being imported on a CPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    use(monkeypatch, Steady)


def use(monkeypatch: pytest.MonkeyPatch, reader: MakeReader) -> None:
    monkeypatch.setattr(nvml, "NvmlReader", reader)


def output_of(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Return the command's output on stderr, one line, or on stdout where nothing is wrong."""
    assert main(["check", ONE_GPU, *FEW_PROMPTS, *arguments]) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == (1 if code else 0)
    return said.err if code else said.out


@pytest.mark.usefixtures("four_gpus")
def test_without_transformer_engine_there_is_one_line_more(capsys: pytest.CaptureFixture[str]) -> None:
    warning, nothing = output_of(capsys, 0).splitlines()
    assert warning.startswith("train: Transformer Engine is absent; Megatron-Core's own layers take its place")
    assert warning.endswith("-r requirements-gpu.txt") and "nothing wrong" in nothing
    assert "Transformer Engine" not in output_of(capsys, 0, *NODES)


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_gpus_whose_experts_take_more_steps_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FourGpus, "has_transformer_engine", True)
    assert "fused_experts" not in output_of(capsys, 0)
    use(monkeypatch, Ampere)
    assert output_of(capsys, 0).startswith(
        "train.fused_experts: GPU 0 of this machine has compute capability 8.0, and fused experts need 9.x; "
    )
    assert "fused_experts" not in output_of(capsys, 0, "train.fused_experts=false")
    two = ("placement.actor=cuda:0-1", "train.layout={ep: 2}", "train.megatron={moe_token_dispatcher_type: allgather}")
    for setting in ("train.copy_engine_dispatcher=true", "train.predicted_expert_capacity=true"):
        line = f"{setting} needs fused experts; GPU 0 of this machine has compute capability 8.0"
        assert line in output_of(capsys, 2, *two, setting)
    assert "fused_experts" not in output_of(capsys, 0, *NODES)


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_fp8_is_refused_on_gpus_that_lack_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = ("train.precision=fp8", "algorithm.correction={weights: token}")
    engines = ("rollout.engine.precision=fp8", "rollout.weights.share=false", "algorithm.correction={weights: token}")
    line = "train.precision=fp8 needs Transformer Engine, which is absent here; expected null"
    assert line in output_of(capsys, 2, *training)
    monkeypatch.setattr(FourGpus, "has_transformer_engine", True)
    output_of(capsys, 0, *training)
    output_of(capsys, 0, *engines)
    for gpus, capability in ((Ampere, "8.0"), (Blackwell, "10.0")):
        use(monkeypatch, gpus)
        for settings in (training, engines):
            line = f"{settings[0]}: GPU 0 of this machine has compute capability {capability}, expected 9.x; or null"
            assert line in output_of(capsys, 2, *settings)


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_adapters_with_engines_in_fp8_are_refused_on_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("train.lora={rank: 8}", "warmup=null", "rollout.engine.precision=fp8", "rollout.weights.share=false")
    line = "train.lora with rollout.engine.precision=fp8 was not tried on GPUs; expected null"
    assert line in output_of(capsys, 2, *settings, "algorithm.correction={weights: token}")
    assert line in output_of(capsys, 2, *NODES, *settings, "algorithm.correction={weights: token}")
    line = "train.fp8.num_layers_at_end_in_bf16 with rollout.engine.precision=fp8 was not tried on GPUs; expected none"
    assert line in output_of(capsys, 2, *settings[1:], "train.fp8.num_layers_at_end_in_bf16=1")
    apart = "train.lora={engine: adapter, targets: [q_proj]}"
    line = "train.lora.engine=adapter was not tried on GPUs; expected merged"
    assert line in output_of(capsys, 2, apart, "warmup=null")


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_in_use_is_refused_on_this_machine_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Taken)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    second = ("placement.actor=cuda:1", "placement.rollout=cuda:1")
    assert "GPUs in use by others: GPU 1 (47.2 of 150.8 GB, nvidia-smi: 3, pid" in output_of(capsys, 2, *second)
    output_of(capsys, 0)
    output_of(capsys, 0, *second, "placement.shared_gpus=true")
    output_of(capsys, 0, *second, "--nodes", "1", "--gpus-per-node", "4")
    output_of(capsys, 0, *second, "placement.cluster=auto")
    output_of(capsys, 0, "placement.reward=cuda:1")  # calls functions, and takes none of its memory


@pytest.mark.usefixtures("four_gpus")
def test_where_nvml_says_nothing_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Absent)
    output_of(capsys, 0, "rollout.engine.attention_backend=fa3")


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("module", "package"), [("sgl_kernel", "sglang-kernel"), ("flashinfer", "flashinfer-python")])
def test_a_library_that_the_engine_imports_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert f"placement.rollout: {module} is absent, without which" in (line := output_of(capsys, 2))
    assert f"pip install {package}\n" in line
    output_of(capsys, 0, *NODES)
    requirements = (RECIPES.parents[1] / "requirements.lock").read_text().splitlines()
    assert any(requirement.startswith(f"{package}==") for requirement in requirements)


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_flash_attention_3_needs_its_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output_of(capsys, 0, "rollout.engine.attention_backend=fa3")
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)
    line = output_of(capsys, 2, "rollout.engine.attention_backend=fa3")
    assert "rollout.engine.attention_backend=fa3: the installed sgl_kernel has no flash_ops library" in line
    output_of(capsys, 0, "rollout.engine.attention_backend=flashinfer")
    line = output_of(capsys, 2, "rollout.engine.cascade_attention=true")
    assert "rollout.engine.cascade_attention=true: the installed sgl_kernel has no flash_ops" in line
    assert line.endswith("expected sglang-kernel as in requirements.lock, or false\n")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("kind", "latent", "message"),
    [
        (Steady, True, None),
        (Ampere, False, None),
        (Ampere, True, "compute capability 8.0, expected 9.x for latent attention; or another backend"),
        (Blackwell, False, "GPU 0 of this machine has compute capability 10.0, expected 8.x or 9.x; or another"),
    ],
)
def test_flash_attention_3_needs_a_gpu_that_it_is_made_for(
    monkeypatch: pytest.MonkeyPatch, kind: MakeReader, latent: bool, message: str | None
) -> None:
    use(monkeypatch, kind)
    recipe = load_recipe(ONE_GPU, ["rollout.engine.attention_backend=fa3"])
    if message is None:
        check_rollout_libraries(recipe.rollout.engine, FIRST["rollout"], latent=latent)
        return
    with pytest.raises(UserError) as refused:
        check_rollout_libraries(recipe.rollout.engine, FIRST["rollout"], latent=latent)
    assert message in str(refused.value)
    automatic = load_recipe(ONE_GPU).rollout.engine  # where SGLang chooses
    check_rollout_libraries(automatic, FIRST["rollout"], latent=latent)


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_models_that_no_gpu_has_room_for_are_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = "GPU 0 of node 0: 19.2 GB in phase update of actor on a GPU of 16.0 GB (actor weights 1.9, "
    assert refused in output_of(capsys, 2, *NODES, "--gpu-gb", "16")
    assert refused in output_of(capsys, 2, "--gpu-gb", "16")
    output_of(capsys, 0, *NODES, "--gpu-gb", "20")  # enough for short responses
    output_of(capsys, 0, *NODES)  # of unknown size
    use(monkeypatch, Small)
    assert refused in output_of(capsys, 2)
    output_of(capsys, 0, *NODES)
    output_of(capsys, 0, "placement.actor=cpu:0", "placement.rollout=cpu:0")


@pytest.mark.slow
@pytest.mark.usefixtures("four_gpus")
def test_host_memory_is_checked_on_this_machine_also_where_its_gpus_say_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offload = "train.optimizer.offload=true"
    use(monkeypatch, Absent)
    output_of(capsys, 0, offload)
    assert "GB of host memory, page-locked, on a node of 1.0 GB (" in output_of(capsys, 2, offload, "--host-gb", "1")
    monkeypatch.setattr(recipe_check, "machine_bytes", lambda: 10**9)
    assert "on a node of 1.0 GB (" in output_of(capsys, 2, offload)
    output_of(capsys, 0, offload, *NODES)  # of unknown size


@pytest.mark.usefixtures("four_gpus")
def test_the_gpus_of_models_and_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b,GPU-c")
    devices = {
        "actor": [Device(0, "cuda", 2), Device(0, "cuda", 0)],
        "rollout": [Device(0, "cuda", 0)],
        "reference": [Device(0, "cpu", 1)],
        "reward": [Device(0, "cuda", 1)],
    }
    assert used_gpus(devices) == {0: "GPU-a", 2: "GPU-c"}


GPU, CPU = [Device(0, "cuda", 0)], [Device(0, "cpu", 0)]
FLASH = ("train.dtype=bfloat16", "train.megatron={attention_backend: flash}")


class Full(CudaPlatform):
    has_transformer_engine = True


def test_what_models_and_engines_need_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "platform", Full())
    plain, flash = (load_recipe(DEMO, overrides).megatron_roles for overrides in ((), FLASH))
    both, apart = {"actor": GPU, "rollout": GPU}, {"actor": GPU, "rollout": CPU}
    assert list(needed_modules(plain, both, every=True)) == ["transformer_engine.pytorch", "sgl_kernel", "flashinfer"]
    assert list(needed_modules(flash, apart, every=True)) == ["transformer_engine.pytorch", "flash_attn.cute"]
    assert list(needed_modules(flash, both, every=False)) == ["flash_attn.cute"]
    assert needed_modules(plain, both, every=False) == {}
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

    monkeypatch.setattr(gpu_check, "platform", Full())
    monkeypatch.setattr(gpu_check, "first_failure", lambda modules: (modules[0], reason))
    with pytest.raises(UserError) as caught:
        check_imports(load_recipe(DEMO, FLASH).megatron_roles, {"actor": GPU, "rollout": GPU}, every=False)
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


@pytest.mark.usefixtures("four_gpus")
def test_engines_in_fp8_that_load_files_are_refused_on_gpus(tmp_path: Path) -> None:
    recipe = load_recipe(RECIPES / "fp8.yaml", [f"run_dir={tmp_path}", *FEW_PROMPTS])
    alone = EvaluationRecipe.of(recipe, ["eval"])
    on_gpu = alone.placement.model_copy(update={"rollout": "cuda:0"})
    alone = alone.model_copy(update={"placement": on_gpu})
    line = "rollout.engine.precision=fp8 was not tried with hybridflow evaluate on GPUs; expected null"
    with pytest.raises(UserError, match=line):
        check_evaluation_alone(alone, has_weights=False)
