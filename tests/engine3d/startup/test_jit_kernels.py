"""Kernels that are compiled ahead are ones that SGLang has, and it is done once."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reshard_plan import named_model
from engine3d.sglang_source import sglang_directory
from engine3d.startup import jit_kernels


@pytest.mark.parametrize(("model", "tp"), [("qwen3-30b-a3b", 4), ("llama-3-70b", 8), ("deepseek-v3", 1)])
def test_sglang_compiles_by_these_functions(model: str, tp: int) -> None:
    kernels = jit_kernels.kernels(named_model(model).hf_config, "bfloat16", tp)
    assert len(set(kernels)) == len(kernels) >= 3
    for kernel in kernels:
        tree = ast.parse((sglang_directory() / "jit_kernel" / f"{kernel.module}.py").read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert len(functions[kernel.function].args.args) == len(kernel.arguments), kernel


def test_arguments_are_those_of_a_ranks_part() -> None:
    config = named_model("qwen3-30b-a3b").hf_config
    rows = {
        tp: next(
            kernel.arguments for kernel in jit_kernels.kernels(config, "bfloat16", tp) if kernel.module == "kvcache"
        )
        for tp in (1, 4, 8)
    }
    assert rows == {1: (4 * 128 * 2,), 4: (128 * 2,), 8: (128 * 2,)}  # four key heads of 128, in bf16


def test_nothing_is_compiled_twice_or_for_an_unknown_family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("TVM_FFI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit_kernels.subprocess, "Popen", lambda command, **_: started.append(command))
    model = tmp_path / "model"
    model.mkdir()

    def start(config: str) -> list[list[str]]:
        started.clear()
        (model / "config.json").write_text(config)
        jit_kernels.start(arguments)
        return list(started)

    arguments: dict[str, Any] = {"model_path": model, "dtype": "bfloat16", "tp_size": 2}
    known = '{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}'
    [command] = start(known)
    stamp = Path(command[-1])
    assert stamp.parent == tmp_path / "cache"
    stamp.parent.mkdir()
    stamp.touch()
    assert start(known) == []
    assert start(known.replace("64", "128")) != []
    for other in ('{"model_type": "other"}', known.replace("2}", "null}"), "no JSON"):
        assert start(other) == []


def test_what_sglang_would_not_compile_is_left_out() -> None:
    config = {**named_model("qwen3-30b-a3b").hf_config, "head_dim": 80}
    modules = {kernel.module for kernel in jit_kernels.kernels(config, "bfloat16", 16)}
    assert "kvcache" in modules and not {"norm", "all_reduce"} & modules
