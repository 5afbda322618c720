"""Parallel compilation of the kernels that SGLang would compile one after another in its first start on a machine.

    python -m engine3d.startup.jit_kernels MODEL_DIRECTORY DTYPE TP STAMP

SGLang compiles a kernel (nvcc, by tvm-ffi) when it first needs it, several seconds each, and keeps it in a cache. This
process compiles them while SGLang is still being imported, in a directory of its own, and moves them into that cache
when they are complete. SGLang compiles any other kernel itself, and any that is late.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine3d.input_files import read_model_config
from engine3d.startup import is_on

_CACHE_VARIABLE, _CACHE = "TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi"
_PREFIX = "engine3d-"
_STALE_S = 3600.0
_ALL_REDUCE = (2, 4, 6, 8)
"""Tensor parallel sizes for which SGLang has an all-reduce of its own."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, as SGLang compiles it.

    Args:
        module: of the package sglang.jit_kernel.
        function: in it, which compiles and loads.
        arguments: of the function; names of torch's dtypes stand for them.
    """

    module: str
    function: str
    arguments: tuple[Any, ...] = ()


def start(server_arguments: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Begin to compile for an engine; None if this machine has the kernels already, or starts take no shortcuts."""
    if not is_on():
        return None
    try:
        arguments = [str(server_arguments[name]) for name in ("model_path", "dtype", "tp_size")]
        planned = kernels(read_model_config(Path(arguments[0])), arguments[1], int(arguments[2]))
        described = [version("sglang"), version("apache-tvm-ffi"), *map(str, planned)]
        name = _PREFIX + hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
        stamp = Path(os.environ.get(_CACHE_VARIABLE, _CACHE)).expanduser() / name
        if stamp.exists():
            return None
        return subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments, str(stamp)], stdin=subprocess.DEVNULL)
    except Exception as error:  # a family that is described in other terms, a cache that cannot be read
        _report(error)
        return None


def kernels(config: Mapping[str, Any], dtype: str, tp: int) -> list[Kernel]:
    """List the kernels that an engine is going to need.

    Args:
        config: of the model, as HuggingFace has it.
        dtype: of its activations and its KV cache.
        tp: tensor parallel size.
    """
    needed = [
        Kernel("activation", "_jit_activation_module", (dtype,)),
        Kernel("clamp_position", "_jit_clamp_position_module", ("int64",)),
        Kernel("resolve_future_token_ids", "_jit_resolve_future_token_ids_module", ("int64",)),
    ]
    half = dtype != "float32"
    if "kv_lora_rank" not in config:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        groups = max(1, config["num_key_value_heads"] // tp)
        needed.append(Kernel("kvcache", "_jit_kvcache_module", (groups * head * (2 if half else 4),)))
        needed.append(Kernel("rope", "_jit_fused_rope_module", (True, head, dtype)))
        if half and head in (64, 128, 256) and config["model_type"].startswith("qwen3"):
            needed.append(Kernel("norm", "_jit_qknorm_module", (head, dtype)))
    if tp in _ALL_REDUCE:
        needed += [Kernel("all_reduce", "_init_communicator"), Kernel("all_reduce", "_init_ipc_manager")]
        needed.append(Kernel("all_reduce", "get_all_reduce_module", (dtype, tp)))
    return needed


def _compile(kernel: Kernel) -> None:
    import torch

    arguments = [getattr(torch, value) if isinstance(value, str) else value for value in kernel.arguments]
    try:
        getattr(import_module(f"sglang.jit_kernel.{kernel.module}"), kernel.function)(*arguments)
    except Exception as error:
        _report(error)


def _report(error: Exception) -> None:
    print(f"not compiled ahead: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)


def main(arguments: list[str]) -> None:
    """Compile all planned kernels, and leave a stamp. Nothing depends on it: a failure is only printed."""
    import pynvml
    from sglang.jit_kernel.utils import arch

    model, dtype, tp, stamp = arguments
    planned = kernels(read_model_config(Path(model)), dtype, int(tp))
    for kernel in planned:
        import_module(f"sglang.jit_kernel.{kernel.module}")
    pynvml.nvmlInit()
    # Asking CUDA would take half a gigabyte of the GPU for as long as this process lives.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    capability = pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0))
    cache = Path(stamp).parent
    cache.mkdir(parents=True, exist_ok=True)
    _remove_stale(cache)
    with tempfile.TemporaryDirectory(dir=cache, prefix=_PREFIX) as made:
        os.environ[_CACHE_VARIABLE] = made
        # Processes, because what SGLang tells the compiler is in their environment.
        workers = min(len(planned), os.cpu_count() or 1)
        with (
            arch.override_jit_cuda_arch(*capability, arch._cuda_arch_suffix(*capability)),
            ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool,
        ):
            list(pool.map(_compile, planned))
        for path in Path(made).iterdir():
            if any(path.glob("*.so")):
                with contextlib.suppress(OSError):  # SGLang was faster
                    path.rename(cache / path.name)
    Path(stamp).touch()


def _remove_stale(cache: Path) -> None:
    """Remove the leftovers of processes that were killed."""
    for path in cache.glob(f"{_PREFIX}*"):
        if path.is_dir() and time.time() - path.stat().st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Exception as error:
        _report(error)
