"""Weights and optimizers that are offloaded between turns: the memory is freed, the bits stay."""

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
from engine3d.platform.offload_memory import FileMemory
from engine3d.training import offload
from engine3d.training.config import TrainConfig
from engine3d.training.offload import Offload
from tests.engine3d.training.test_engine import SETTINGS, _local_samples, _loss, _samples
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves

MB = 1 << 20


def _tensors() -> list[torch.Tensor]:
    """A buffer with two views of it, and others of several dtypes and sizes."""
    device = platform.device(0)
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(24 * MB // 4, generator=generator).to(device)
    views = [buffer[: MB // 4].view(512, -1), buffer[MB // 4 :]]
    others = [torch.randn(count, generator=generator).bfloat16().to(device) for count in (5_000, MB, 7 * MB + 3)]
    return [*views, *others, torch.ones(3, device=device)]


@pytest.mark.slow
def test_offloaded_tensors_have_no_memory_and_are_onloaded_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 8 * MB)
    tensors = _tensors()
    expected = [tensor.clone() for tensor in tensors]
    addressed = tensors[1][10:20]
    moved = Offload(platform.device(0), constant=False)
    for _ in range(2):
        before = platform.memory().allocated
        moved.offload(tensors)
        freed = before - platform.memory().allocated
        assert freed > 0.9 * sum(tensor.numel() * tensor.element_size() for tensor in expected), freed / MB
        assert [tensor.untyped_storage().nbytes() > 0 for tensor in tensors] == [False] * 5 + [True]
        assert torch.equal(moved.where(addressed).cpu(), expected[1][10:20].cpu())
        assert torch.equal(moved.where(tensors[4])[7:].cpu(), expected[4][7:].cpu())
        moved.onload()
        assert moved.where(addressed) is addressed
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, expected, strict=True))
        for tensor, copy in zip(tensors, expected, strict=True):  # as an update does: the next copy is another
            tensor.add_(1)
            copy.add_(1)
    stats = moved.take_stats()
    assert stats.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in (tensors[0], *tensors[2:5]))
    assert stats.offload_s > 0 and stats.onload_s > 0 and moved.take_stats().nbytes == 0


def test_constant_tensors_are_copied_once_unless_they_are_changed() -> None:
    tensors = _tensors()[2:4]
    moved = Offload(platform.device(0), constant=True)
    moved.offload(tensors)
    moved.onload()
    kept = tensors[1].clone()
    tensors[1].zero_()  # nobody does that to a model that does not learn; here it shows that nothing is copied
    moved.offload(tensors)
    moved.onload()
    assert torch.equal(tensors[1], kept)
    moved.forget()
    tensors[1].zero_()
    moved.offload(tensors)
    moved.onload()
    assert not tensors[1].any()


def test_no_room_is_one_line_and_leaves_everything_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(platform, "offload_memory", FileMemory)
    tensors = _tensors()
    moved = Offload(platform.device(0), constant=False)
    with pytest.raises(EngineError, match=r"^host memory: no room for the .* of a model.* \(/.*: No space left on"):
        moved.offload(tensors)
    assert not moved.is_offloaded and all(tensor.untyped_storage().nbytes() for tensor in tensors)


def _logprobs(engine: Any, sequences: Any) -> Any:
    outputs = engine.logprobs(sequences)
    return outputs.logprobs


def _updated(directory: Path, offloads: bool, trainable: bool, **settings: Any) -> dict[str, Any]:
    """Updates and log-probs of an engine that gives back what it has between all calls."""
    from engine3d.checkpoint.state import parameter_shards
    from engine3d.training.engine import TrainEngine

    # In bfloat16 the optimizer has masters of its own, in float32 they are the model's weights.
    dtype = "bfloat16" if trainable else "float32"
    config = TrainConfig(**{"dtype": dtype, "micro_batch_tokens": 48, "optimizer": SETTINGS} | settings)
    engine = TrainEngine(directory, config, Layout(), trainable=trainable, seed=1, offload=offloads)
    sequences, _ = _local_samples(_samples(), engine)
    seen: dict[str, Any] = {"norms": [], "state": [], "offloaded": []}
    for _ in range(2):  # the first learning rate is 0
        engine.offload()
        seen["offloaded"].append(_device_bytes(engine))
        seen["logprobs"] = _logprobs(engine, sequences)
        engine.offload()
        if trainable:
            seen["norms"].append(engine.update(sequences, _loss, with_entropy=True).grad_norm)
            engine.offload()
        # What a checkpoint that is saved now reads.
        seen["state"].append(
            [
                shard.read(kind, 0, shard.stop - shard.start).clone()
                for shard in parameter_shards(engine)
                for kind in shard.kinds()
            ]
        )
    seen["moved"] = engine.take_offload_stats().nbytes
    seen["at rest"] = _device_bytes(engine)
    engine.load(directory)
    seen["rested after load"] = _device_bytes(engine)
    seen["loaded"] = _logprobs(engine, sequences)
    engine.close()
    return seen


def _device_bytes(engine: Any) -> int:
    """Device bytes of weights, gradients and optimizer, without tensors too small to be moved."""
    storages = {tensor.untyped_storage() for tensor in engine._resident()}
    here = [storage.nbytes() for storage in storages if storage.device.type == engine.device.type]
    return sum(nbytes for nbytes in here if nbytes >= offload.LEAST_BYTES)


def all_updated(directory: Path, **settings: Any) -> list[dict[str, Any]]:
    return [
        _updated(directory, offloads, trainable, **settings)
        for trainable in (True, False)
        for offloads in (False, True)
    ]


def check_same(results: list[dict[str, Any]]) -> None:
    """Assert that `all_updated` returns the same for models that stay and models that are offloaded."""
    for stays, leaves in (results[:2], results[2:]):
        assert stays["norms"] == leaves["norms"]
        assert torch.equal(stays["logprobs"], leaves["logprobs"])
        assert torch.equal(stays["loaded"], leaves["loaded"])
        assert len(stays["state"][-1]) == len(leaves["state"][-1])
        for before, after in zip(stays["state"], leaves["state"], strict=True):
            assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(before, after, strict=True))
        assert stays["moved"] == 0 and stays["at rest"] > 0
        assert leaves["moved"] == stays["at rest"]
        assert leaves["offloaded"] == [0, 0] and leaves["at rest"] == 0 and leaves["rested after load"] == 0


@proves("qwen3_moe", "packing offload")
@pytest.mark.processes
@pytest.mark.skipif(platform.gpus > 0, reason="test_offload_gpu has what a GPU computes alike")
def test_a_model_that_is_away_between_all_calls_computes_the_same_bits(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "moe")
    [results] = run_distributed(all_updated, 1, tmp_path / "moe", timeout_s=300)
    check_same(results)
