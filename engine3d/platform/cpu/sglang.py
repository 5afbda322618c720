"""Requirements of SGLang on a CPU: its platform class, its arguments and its environment.

SGLang finds `activate` through the entry point group `sglang.srt.platforms`, in every process that it starts. Nothing
of SGLang is imported here, because the rollout client asks for the arguments and should not pay for SGLang's imports.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine3d.startup.lazy_imports import torch

# Read by our SGLang plugin (engine3d.rollout.scheduler.plugin), in SGLang's main process.
START_METHOD_VARIABLE = "ENGINE3D_SGLANG_START_METHOD"

SINK_BACKEND = "intel_amx"
"""The only attention backend on a CPU that SGLang accepts for gpt-oss. Without AMX it takes torch_native in its place.
"""

_LEFT_OUT = ("scipy", "sklearn", "torchao")
"""Packages that transformers imports with any model where they are installed, for object detection, assisted generation
and a quantization: a second of each start, without use here. scikit-learn needs SciPy."""


def activate() -> str | None:
    """The qualified name of SGLang's platform class for this machine, or None to leave SGLang's own choice alone.

    A machine with a GPU keeps SGLang's CUDA platform, and SGLANG_USE_CPU_ENGINE=1 keeps SGLang's own CPU engine.
    """
    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if "transformers" not in sys.modules:  # which looks once for what there is
        for name in _LEFT_OUT:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    return "engine3d.platform.cpu.sglang_modules.platform.NativeCpuPlatform"


def server_arguments() -> dict[str, Any]:
    """SGLang engine arguments without which it does not run on a CPU."""
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "moe_runner_backend": "auto",
        "page_size": 1,
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,  # there is no second stream to overlap with
        "sleep_on_idle": True,  # a scheduler that polls would take a core from the trainer
        "disable_custom_all_reduce": True,
    }


def sink_arguments() -> dict[str, Any]:
    """More of them, for a model whose attention has sinks."""
    return {
        "attention_backend": SINK_BACKEND,
        "moe_runner_backend": "triton",  # else the weights of experts are transposed
        "disable_hybrid_swa_memory": True,
    }


def environment(tp: int) -> dict[str, str]:
    """Environment of SGLang's processes on a CPU, for a tensor parallel size."""
    variables = {
        # Small functions decorated with torch.compile would each start a C++ compiler for a minute.
        "TORCHDYNAMO_DISABLE": "1",
        # NCCL's library is there but there is no device for it: a path to nothing makes SGLang's wrapper stand aside.
        "SGLANG_NCCL_SO_PATH": os.devnull,
        "CUDA_VISIBLE_DEVICES": "",
        # Forked processes need not import SGLang each once more, which is most of a start; only CUDA forbids that.
        # A test that is to see what GPUs do gives "spawn".
        START_METHOD_VARIABLE: os.environ.get(START_METHOD_VARIABLE, "fork"),
        # As torchrun has it: threads that wait for one another are slow where processes share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    if tp > 1:
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores_of_ranks(tp))
    return variables


def _cores_of_ranks(tp: int) -> list[str]:
    """The cores of each rank, in SGLang's notation; ranks share cores where there are fewer cores than ranks."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // tp
    if share == 0:
        return [str(cores[rank % len(cores)]) for rank in range(tp)]
    return [",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(tp)]
