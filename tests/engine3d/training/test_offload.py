"""Weights and optimizers that are away from their device between turns: the memory is given back, the bits are not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.errors import EngineError
from engine3d.layout import Layout
from engine3d.platform import platform
from engine3d.platform.away import FileMemory
from engine3d.training import offload
from engine3d.training.config import TrainConfig
from engine3d.training.offload import Offload
from tests.engine3d.training.test_engine import SETTINGS, _loss, _own, _samples
from tests.support import tiny_families
from tests.support.distributed import run_distributed

MB = 1 << 20


def _tensors() -> list[torch.Tensor]:
    """A buffer with two views of it, and others of several dtypes and sizes."""
    device = platform.device(0)
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(24 * MB // 4, generator=generator).to(device)
    views = [buffer[: MB // 4].view(512, -1), buffer[MB // 4 :]]
    others = [torch.randn(count, generator=generator).bfloat16().to(device) for count in (5_000, MB, 7 * MB + 3)]
    return [*views, *others, torch.ones(3, device=device)]


def test_what_is_away_has_no_memory_and_comes_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 8 * MB)
    tensors = _tensors()
    expected = [tensor.clone() for tensor in tensors]
    addressed = tensors[1][10:20]
    away = Offload(platform.device(0), constant=False)
    for _ in range(2):
        before = platform.memory().allocated
        away.put_away(tensors)
        freed = before - platform.memory().allocated
        assert freed > 0.9 * sum(tensor.numel() * tensor.element_size() for tensor in expected), freed / MB
        assert [tensor.untyped_storage().nbytes() > 0 for tensor in tensors] == [False] * 5 + [True]
        assert torch.equal(away.where(addressed).cpu(), expected[1][10:20].cpu())
        assert torch.equal(away.where(tensors[4])[7:].cpu(), expected[4][7:].cpu())
        away.bring_back()
        assert away.where(addressed) is addressed
        assert all(torch.equal(tensor, wanted) for tensor, wanted in zip(tensors, expected, strict=True))
        for tensor, wanted in zip(tensors, expected, strict=True):  # as an update does: the next copy is another
            tensor.add_(1)
            wanted.add_(1)
    figures = away.take_figures()
    assert figures.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in (tensors[0], *tensors[2:5]))
    assert figures.away_s > 0 and figures.back_s > 0 and away.take_figures().nbytes == 0


def test_constant_tensors_are_copied_once_unless_they_are_changed() -> None:
    tensors = _tensors()[2:4]
    away = Offload(platform.device(0), constant=True)
    away.put_away(tensors)
    away.bring_back()
    kept = tensors[1].clone()
    tensors[1].zero_()  # nobody does that to a model that does not learn; here it shows that nothing is copied
    away.put_away(tensors)
    away.bring_back()
    assert torch.equal(tensors[1], kept)
    away.forget()
    tensors[1].zero_()
    away.put_away(tensors)
    away.bring_back()
    assert not tensors[1].any()


def test_no_room_is_one_line_and_leaves_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(platform, "away_memory", FileMemory)
    tensors = _tensors()
    away = Offload(platform.device(0), constant=False)
    with pytest.raises(EngineError, match=r"^host memory: no room for the .* of a model.* \(/.*: No space left on"):
        away.put_away(tensors)
    assert not away.is_away and all(tensor.untyped_storage().nbytes() for tensor in tensors)


def _updated(directory: Path, offloads: bool, trainable: bool, **settings: Any) -> dict[str, Any]:
    """Updates and log-probs of an engine that gives back what it has between all calls."""
    from engine3d.checkpoint.state import held_parameters
    from engine3d.training.engine import TrainEngine

    # In bfloat16 the optimizer has masters of its own, in float32 they are the model's weights.
    dtype = "bfloat16" if trainable else "float32"
    config = TrainConfig(**{"dtype": dtype, "micro_batch_tokens": 48, "optimizer": SETTINGS} | settings)
    engine = TrainEngine(directory, config, Layout(), trainable=trainable, seed=1, offload=offloads)
    sequences, _ = _own(_samples(), engine)
    seen: dict[str, Any] = {"norms": [], "held": [], "away": []}
    for _ in range(3):
        engine.give_back()
        seen["away"].append(_device_bytes(engine))
        seen["logprobs"] = engine.logprobs(sequences).logprobs
        engine.give_back()
        if trainable:
            seen["norms"].append(engine.update(sequences, _loss, with_entropy=True).grad_norm)
            engine.give_back()
        # What a checkpoint that is saved now reads.
        seen["held"].append(
            [
                held.read(kind, 0, held.stop - held.start).clone()
                for held in held_parameters(engine)
                for kind in held.kinds()
            ]
        )
    seen["moved"] = engine.take_offload_figures().nbytes
    seen["at rest"] = _device_bytes(engine)
    engine.load(directory)
    seen["rested after load"] = _device_bytes(engine)
    seen["loaded"] = engine.logprobs(sequences).logprobs
    engine.close()
    return seen


def _device_bytes(engine: Any) -> int:
    """Of weights, gradients and optimizer, without what is too small to be moved."""
    storages = {tensor.untyped_storage() for tensor in engine._kept()}
    here = [each.nbytes() for each in storages if each.device.type == engine.device.type]
    return sum(nbytes for nbytes in here if nbytes >= offload.LEAST_BYTES)


def all_updated(directory: Path, **settings: Any) -> list[dict[str, Any]]:
    return [
        _updated(directory, offloads, trainable, **settings)
        for trainable in (True, False)
        for offloads in (False, True)
    ]


def check_same(results: list[dict[str, Any]]) -> None:
    """What `all_updated` found of models that stay is what it found of those that leave."""
    for stays, leaves in (results[:2], results[2:]):
        assert stays["norms"] == leaves["norms"]
        assert torch.equal(stays["logprobs"], leaves["logprobs"])
        assert torch.equal(stays["loaded"], leaves["loaded"])
        assert len(stays["held"][2]) == len(leaves["held"][2])
        for before, after in zip(stays["held"], leaves["held"], strict=True):
            assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(before, after, strict=True))
        assert stays["moved"] == 0 and stays["at rest"] > 0
        assert leaves["moved"] == stays["at rest"]
        assert leaves["away"] == [0, 0, 0] and leaves["at rest"] == 0 and leaves["rested after load"] == 0


@pytest.mark.processes
@pytest.mark.skipif(platform.gpus > 0, reason="test_offload_gpu has what a GPU computes alike")
def test_a_model_that_is_away_between_all_calls_computes_the_same_bits(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "moe")
    [results] = run_distributed(all_updated, 1, tmp_path / "moe", timeout_s=180)
    check_same(results)
