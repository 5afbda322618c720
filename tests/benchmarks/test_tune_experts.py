"""Tiles that are tried for experts, the choice of the best, and the file that is written of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import tune_experts
from benchmarks.tune_experts import Tiles, Times, best, both, choices, nearest, shapes_of, write

pytestmark = pytest.mark.slow

SHAPES = shapes_of("qwen3-30b-a3b", 4)


def test_a_ranks_experts() -> None:
    sizes = {"experts": 128, "local": 32, "hidden": 2048, "width": 768, "chosen": 8}
    assert SHAPES.model_dump() == sizes | {"precision": None}


def test_tiles_fit_a_processor() -> None:
    candidates = choices()
    assert len({tuple(tiles.values()) for tiles in candidates}) == len(candidates) > 50
    for tiles in candidates:
        rows = tiles["BLOCK_SIZE_M"] + tiles["BLOCK_SIZE_N"]
        assert 2 * tiles["num_stages"] * rows * tiles["BLOCK_SIZE_K"] <= 227 * 1024
    assert {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1} | {
        "num_warps": 8,
        "num_stages": 4,
    } in candidates


def test_tables_of_experts_in_fp8_are_those_of_their_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
    monkeypatch.setattr(f"{config}.get_device_name", lambda: "NVIDIA H200")
    shapes = shapes_of("qwen3-30b-a3b", 1, "fp8")
    assert "dtype=fp8_w8a8,block_shape=[128, 128]" in tune_experts._table_name(128, shapes)
    now = tune_experts.tiles_now(shapes)
    assert now and now != tune_experts.tiles_now(shapes_of("qwen3-30b-a3b", 1))
    assert {tiles["BLOCK_SIZE_K"] for tiles in choices("fp8")} == {128}


@pytest.mark.slow
def test_the_best_of_both_products_have_one_block_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
    monkeypatch.setattr(f"{config}.get_device_name", lambda: "NVIDIA H200")
    a, b, c = choices()[0], choices()[1], next(tiles for tiles in choices() if tiles["BLOCK_SIZE_M"] == 64)
    now = tune_experts.tiles_now(SHAPES)
    assert {1024, 2048} < set(now)

    def took(first: float, last: float) -> Times:
        return {"first": {1024: first, 5000: 1.0}, "last": {1024: last, 5000: 1.0}}

    measured: list[tuple[Tiles, Times]] = [(a, took(1.0, 5.0)), (b, took(4.0, 2.0)), (c, took(0.5, 4.0))]
    measured.append((now[1024], took(3.0, 3.0)))
    measured.append((now[max(now)], took(3.0, 3.0)))
    table = {count: best(measured, count) for count in (1024, 5000)}
    write(tmp_path, SHAPES, table, now)
    assert table[1024] == (a, b), "c is the fastest first product, and has other rows than the fastest last one"
    before = nearest(now, 1028)
    assert both(measured, *table[1024], 1024) == 3.0 and both(measured, before, before, 1024) == 6.0
    [directory] = (tmp_path / "configs").iterdir()
    first, last = (
        json.loads((directory / f"E=32,N=768,device_name=NVIDIA_H200{ending}.json").read_text())
        for ending in ("", "_down")
    )
    assert (first["1024"], last["1024"]) == (a, b) and "5000" in first
    assert first["2048"] == last["2048"] == now[2048]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU is told")
def test_what_cannot_be_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, ranks, line in (
        ("qwen3-30b-a3b", "4", "this machine has no GPU, whose kernel is tuned"),
        ("qwen3-30b-a3b", "3", "--ranks 3: qwen3-30b-a3b has 128 experts, which cannot be spread evenly"),
        ("llama-3-70b", "1", "--ranks 1: llama-3-70b has 0 experts, which cannot be spread evenly"),
    ):
        assert tune_experts.main(["--model", model, "--ranks", ranks, "--out", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"tune_experts.py: {line}\n"
    arguments = ["--model", "qwen3-30b-a3b", "--out", str(tmp_path), "--tokens"]
    for given in ("256,", "0", "many"):
        assert tune_experts.main([*arguments, given]) == 2
        assert capsys.readouterr().err == (
            f"tune_experts.py: --tokens {given}: expected whole numbers of at least 1, such as 256,1024\n"
        )
