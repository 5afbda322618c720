"""An engine's weights from HuggingFace directories, by the product's own transfer."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from engine3d.models import load_model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Buffer, Holding, Location, RankShards
from engine3d.reshard.describe.strided import contiguous_strides
from engine3d.reshard.plan.coordinate import coordinate
from engine3d.reshard.transport.sender import WeightSender
from engine3d.rollout import RolloutEngine
from engine3d.rollout.host.stream import InFlightPolicy


class CheckpointSender:
    """A trainer of one rank, in this process, whose weights are those of a HuggingFace directory.

    Args:
        engine: that gets the weights. It is started, and shares no memory with another trainer.
        model: a directory of its model.
        drafts: True to send the layer that drafts, too.
    """

    def __init__(self, engine: RolloutEngine, model: Path, *, drafts: bool = False) -> None:
        self._engine = engine
        spec = replace(load_model_spec(model), mtp=drafts)
        tensors = {name: tensor.shape for name, tensor in spec.hf_tensors.items()}
        holdings, elements = [], 0
        for name, shape in tensors.items():
            box = tuple((0, size) for size in shape)
            holdings.append(Holding(name, box, 0, elements, contiguous_strides(shape)))
            elements += prod(shape)
        self._memory = torch.zeros(elements, device=platform.device(0))
        location = Location(platform.node, platform.device_name(0))
        shards = RankShards("checkpoint", 0, location, (Buffer("tensors", "float32", (elements,)),), tuple(holdings))
        self._sender = WeightSender(shards, [self._memory.untyped_storage()])
        orders = coordinate([self._sender.share()], engine.share_weights(drafts=drafts), tensors)
        self._engine_reads = orders.engines_receive
        self._sender.connect(*orders.send)
        if self._engine_reads:
            engine.connect_weights(orders.receive)

    def transfer(
        self, directory: Path, version: int, in_flight: InFlightPolicy = "wait", *, flush_cache: bool = True
    ) -> None:
        """Bring the engine a directory's weights as `version`; see `RolloutEngine.begin_weights`."""
        self._read(directory)
        self._engine.begin_weights(version, in_flight=in_flight)
        if self._engine_reads:
            self._engine.receive_weights(version)
        else:
            self._sender.send(version)
        self._engine.seal_weights(version, flush_cache)
        self._engine.commit_weights(version)

    def _read(self, directory: Path) -> None:
        with TensorFiles(directory) as files:
            for holding in self._sender.shards.holdings:
                sizes = [stop - start for start, stop in holding.box]
                values = files.read(holding.tensor, holding.box)
                self._memory.as_strided(sizes, holding.strides, holding.offset).copy_(values)


def transfer(engine: RolloutEngine, directory: Path, version: int, *, drafts: bool = False) -> None:
    """Bring an engine the weights of a directory as `version`. `drafts`: those of the layer that drafts, too."""
    CheckpointSender(engine, directory, drafts=drafts).transfer(directory, version)
