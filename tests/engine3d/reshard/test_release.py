"""A rank whose weights are released: it reads the next version from the trainer's memory, and padding is zero again."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine3d.layout import Layout
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.platform.cpu.sglang_modules.memory import CpuMemorySaver
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.describe.shards import Location
from engine3d.reshard.describe.source import PlannedTrainer
from engine3d.reshard.plan.coordinate import coordinate
from engine3d.rollout.scheduler.rank import RELEASE_VARIABLE, EngineRank
from tests.support.tiny_families import CONFIGS

VOCABULARY = 100  # SGLang pads it to 128


def _trainer(directory: Path, layout: Layout) -> tuple[list[SharedShards], list[list[torch.Tensor]]]:
    """Ranks of a trainer that hold random weights, and their memory."""
    spec = load_model_spec(directory)
    planned = PlannedTrainer(spec.of_trainer(layout, transformer_engine=False), layout, torch.float32)
    sources, memory = [], []
    for rank in range(layout.world_size):
        shards = planned.shards(rank, Location("here", f"cpu:{rank}"))
        memory.append([torch.randn(buffer.elements) for buffer in shards.buffers])
        handles = tuple(platform.share_memory(tensor.untyped_storage()) for tensor in memory[-1])
        sources.append(SharedShards(shards, handles))
    return sources, memory


@pytest.mark.skipif(platform.gpus > 0, reason="the memory is torch_memory_saver's there, in SGLang's own processes")
def test_a_rank_reads_what_it_released_and_padding_is_zero_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.srt.layers.sampler  # noqa: F401  before a stand-in rank makes torch's logger ask for one

    from engine3d.reshard.describe.simulate import build_model, engine_rank

    monkeypatch.setenv(RELEASE_VARIABLE, "1")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"vocab_size": VOCABULARY}))
    spec, saver = load_model_spec(tmp_path), CpuMemorySaver()
    with engine_rank(1, 1, 0):
        with saver.region("weights"):
            model = build_model(spec.hf_config, torch.float32, "cpu")
        server = SimpleNamespace(model_path=str(tmp_path), quantization=None)
        rank = EngineRank(
            SimpleNamespace(
                model=model,
                model_config=server,
                dtype=torch.float32,
                ps=SimpleNamespace(tp_rank=0),
            )
        )
        target = rank.share("engine 0", 0, [Location("here", "cpu:0")])
        assert target.pulls and set(target.handles) == {None}
        sources, memory = _trainer(tmp_path, Layout(pp=2))
        tensors = {name: tensor.shape for name, tensor in spec.hf_tensors.items()}
        orders = coordinate(sources, [target], tensors)
        rank.connect(orders.receive)
        elements = sum(prod(buffer.shape) for buffer in target.shards.buffers)
        padding = elements - sum(
            prod(stop - start for start, stop in holding.box) for holding in target.shards.holdings
        )
        assert padding > 0
        for version in (1, 2):
            taken = rank.receive(version)["one_sided"]
            assert taken.nbytes == orders.plan.bytes_moved == 4 * (elements - padding)
            rank.seal()
            served = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            assert not served["model.embed_tokens.weight"][VOCABULARY:].any()
            assert served["model.embed_tokens.weight"][:VOCABULARY].all()
            saver.pause("weights")
            saver.resume("weights")
            assert not any(torch.equal(parameter, served[name]) for name, parameter in model.named_parameters())
            rank.restore()
            if version == 1:
                for tensor in (tensor for tensors in memory for tensor in tensors):
                    tensor.neg_()
        rank.receive(3)
        rank.seal()
        assert all(torch.equal(parameter, served[name]) for name, parameter in model.named_parameters())
