"""One model on Megatron-Core: its log-probs and values, updates of it, and its weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import export_weights, load_weights
from engine3d.models.weights import rank_parameters
from engine3d.platform import platform
from engine3d.training import parallel
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.optimizer import of_buffers
from engine3d.training.update import TrainedModel

if TYPE_CHECKING:
    from engine3d.reshard.describe.shards import Place
    from engine3d.reshard.transport.sender import WeightSender


class TrainEngine(TrainedModel):
    """A Megatron-Core model on the ranks of a layout; every rank makes the same calls.

    Args:
        model_directory: HuggingFace directory with config.json and safetensors.
        config: precision, micro-batches, optimizer.
        layout: the cut over ranks; torchrun's variables say which rank this is.
        value_head: a scalar head in place of the vocabulary. Where the directory has none, as that of a language model,
            it starts at 0, so that all first values are 0; a model that is not trained needs one.
        trainable: without it there are neither gradients nor an optimizer.
        seed: of this model's random states.
        load: read the directory's weights; otherwise a checkpoint is loaded before the model is used.
        offload: `give_back` takes weights and optimizer out of the device too. They come back with `take_back`, or with
            the first call that computes with them.

    Raises:
        UserError: a directory, layout or option that does not fit, in one line.
    """

    def __init__(
        self,
        model_directory: Path,
        config: TrainConfig,
        layout: Layout,
        *,
        value_head: bool = False,
        trainable: bool = True,
        seed: int = 0,
        load: bool = True,
        offload: bool = False,
    ) -> None:
        super().__init__(
            model_directory,
            config,
            layout,
            value_head=value_head,
            trainable=trainable,
            seed=seed,
            load=load,
            offload=offload,
        )
        self._take_what_stays()

    def give_back(self) -> None:
        """Free the memory that is only cached, and that of the gradients, which the next update takes again.

        With `offload` that of weights and optimizer too. An optimizer's state that an update has left on the device
        begins to go to host memory; its memory is free with `take_back`.
        """
        if self.optimizer is not None:
            self.model.offload_grad_buffers(synchronize=False, empty_cache=False)
        if self._offload is not None:
            if self._host_state is not None:
                self._host_state.settle()
            self._offload.put_away(self._kept())
        platform.empty_cache()
        if self._host_state is not None:  # after all that waits for the device
            self._host_state.leave()

    def take_back(self) -> None:
        """Have weights and optimizer on the device, where `offload` has taken them away.

        An optimizer's state that an update has left there is in host memory alone after it.
        """
        if self._host_state is not None:
            self._host_state.settle()
        super().take_back()

    def _kept(self) -> Iterator[Tensor]:
        """All that the device holds between updates."""
        yield from self.module.parameters()
        yield from self.module.buffers()
        for each in of_buffers(self.optimizer) if self.optimizer is not None else ():
            for group in each.optimizer.param_groups:
                yield from group["params"]
            for state in each.optimizer.state.values():
                yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))

    @contextmanager
    def _at_hand(self) -> Iterator[None]:
        """Weights and optimizer are on the device, and afterwards where they were."""
        away = self._offload is not None and self._offload.is_away
        self.take_back()
        yield
        if away:
            self.give_back()

    def reset_optimizer(self, settings: OptimizerConfig) -> None:
        """Start the optimizer's moments and its learning-rate schedule afresh; the weights stay."""
        with self._at_hand():
            self._reset_optimizer(settings)

    # Weights ---------------------------------------------------------------------------------------------------------

    def load(self, directory: Path) -> None:
        """Take the weights of a HuggingFace directory; the optimizer's moments stay. Raises as the constructor does."""
        with self._at_hand():
            if self._offload is not None:
                self._offload.forget()
            load_weights(self.module, self.spec, self.layout, self.coordinates, directory)
            if self.optimizer is not None:
                self.optimizer.reload_model_params()

    def export(self, directory: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write the weights as a HuggingFace directory; every rank writes its own part, nothing is gathered."""
        with self._at_hand():
            export_weights(
                self.module, self.spec, self.layout, self.coordinates, Path(directory), dtype=dtype or self.dtype
            )

    def weight_sender(self, name: str, rank: int, place: Place) -> WeightSender:
        """This rank's side of transfers to rollout engines, over the memory that the optimizer writes.

        Args:
            name: how errors call the rank.
            rank: its number among those that send.
            place: where its memory is.
        """
        if self._offload is not None:
            raise UserError("weight_sender: engines would read memory that offload=true gives back")
        from engine3d.reshard.describe.source import model_shards
        from engine3d.reshard.transport.sender import WeightSender

        held = [
            (local, tensor.data)
            for local, tensor in rank_parameters(self.module, self.spec, self.layout, self.coordinates)
        ]
        return WeightSender(*model_shards(held, name, rank, place))

    def close(self) -> None:
        """End the model's process groups. Another engine may be built in this process after it."""
        gc.unfreeze()
        if self._host_state is not None:
            self._host_state.release()
        parallel.release()
