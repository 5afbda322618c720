"""One model on Megatron-Core: its log-probs and values, updates of it, and its weights."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import export_weights, load_weights
from engine3d.models.experts.token_dispatcher import forget_pass
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.files.weights import rank_parameters
from engine3d.models.lora.peft_files import ADAPTERS
from engine3d.models.precision import Precision, check_shards
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.megatron import parallel
from engine3d.training.optimizer import buffer_optimizers
from engine3d.training.update import TrainedModel

if TYPE_CHECKING:
    from engine3d.reshard.describe.shards import Location
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
        offload: `TrainEngine.offload` offloads weights and optimizer too. They are onloaded by `onload`, or by the
            first call that computes with them.

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
        self._allocate_workspaces()

    def offload(self) -> None:
        """Free cached memory and that of the gradients, which the next update takes again.

        With `offload` weights and optimizer are offloaded too. The offload of an optimizer's state that an update has
        left on the device only begins; its memory is free with `onload`.
        """
        if self.optimizer is not None:
            for chunk in self.gradient_chunks:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        if self._offload is not None:
            if self._host_state is not None:
                self._host_state.settle()
            self._offload.offload(self._resident())
        platform.empty_cache()
        if self._host_state is not None:  # after all that waits for the device
            self._host_state.begin_offload()

    def onload(self) -> None:
        """Bring offloaded weights and optimizer back to the device.

        An optimizer's state that an update has left there is in host memory alone afterwards.
        """
        if self._host_state is not None:
            self._host_state.settle()
        super().onload()

    def _resident(self) -> Iterator[Tensor]:
        """Tensors that the device has between updates."""
        yield from self.weighted.parameters()
        yield from self.weighted.buffers()
        for of_buffer in chain.from_iterable(map(buffer_optimizers, self.optimizers)):
            for group in of_buffer.optimizer.param_groups:
                yield from group["params"]
            for state in of_buffer.optimizer.state.values():
                yield from (tensor for tensor in state.values() if isinstance(tensor, Tensor))

    @contextmanager
    def _onloaded(self) -> Iterator[None]:
        """Onload weights and optimizer for the block, and offload them afterwards if they were."""
        was_offloaded = self._offload is not None and self._offload.is_offloaded
        self.onload()
        yield
        if was_offloaded:
            self.offload()

    def reset_optimizer(self, settings: OptimizerConfig) -> None:
        """Start the optimizer's moments and its learning-rate schedule afresh; the weights stay."""
        with self._onloaded():
            self._reset_optimizer(settings)

    # Weights ---------------------------------------------------------------------------------------------------------

    def load(self, directory: Path) -> None:
        """Take the weights of a HuggingFace directory; the optimizer's moments stay. Raises as the constructor does."""
        with self._onloaded():
            if self._offload is not None:
                self._offload.forget()
            if self.adapters is not None:
                raise UserError(f"load of {directory}: adapters belong to the model that they were trained on")
            load_weights(self.weighted, self.spec, self.layout, self.coordinates, directory)
            for optimizer in self.optimizers:
                optimizer.reload_model_params()

    def export(
        self,
        directory: Path,
        *,
        dtype: torch.dtype | None = None,
        precision: Precision | None = None,
        served: bool = False,
    ) -> None:
        """Write the weights as a HuggingFace directory; every rank writes its own part, nothing is gathered.

        Adapters are merged into them. With `served` they are where the engines have them: in a folder of their own if
        they are sent apart.
        """
        directory, apart = Path(directory), served and self._sends_adapters
        merged = self.adapters.merged if self.adapters is not None and not apart else None
        with self._onloaded():
            for spec, path in [(self.spec, directory), *([(self.trained, directory / ADAPTERS)] if apart else [])]:
                export_weights(
                    self.weighted,
                    spec,
                    self.layout,
                    self.coordinates,
                    path,
                    dtype=dtype or self.dtype,
                    precision=precision,
                    merged=merged,
                    multi_token=not served,
                )

    @cached_property
    def base_fingerprint(self) -> str:
        """Fingerprint of the model's directory. Only the first rank reads it; empty on others."""
        if dist.get_rank() or self.spec.directory is None:
            return ""
        with TensorFiles(self.spec.directory) as files:
            return files.fingerprint()

    @property
    def _sends_adapters(self) -> bool:
        """True if engines get adapters apart from the model."""
        return self.adapters is not None and self.config.lora is not None and self.config.lora.engine == "adapter"

    def weight_sender(
        self, name: str, rank: int, location: Location, precision: Precision | None = None
    ) -> WeightSender:
        """This rank's side of transfers to rollout engines, over the memory that the optimizer writes.

        Args:
            name: how errors call the rank.
            rank: its number among those that send.
            location: where its memory is.
            precision: of the engines, if they have quantised weights.

        Raises:
            UserError: the layout divides blocks of quantised weights.
        """
        if self._offload is not None:
            raise UserError("weight_sender: engines would read memory that offload=true frees")
        from engine3d.reshard.describe.source import model_shards
        from engine3d.reshard.transport.sender import WeightSender

        parameters = rank_parameters(self.weighted, self.spec, self.layout, self.coordinates)
        updates: list[Callable[[], None]] = []
        if self._sends_adapters:
            parameters += rank_parameters(self.weighted, self.trained, self.layout, self.coordinates)
        elif self.adapters is not None:
            from engine3d.reshard.transport.merged import MergedWeights

            merged = MergedWeights(parameters, self.adapters)
            parameters = merged.parameters
            updates.append(merged.merge)
        parameters = [(local, tensor.data) for local, tensor in parameters]
        if precision is None:
            base = self.base_fingerprint if self._sends_adapters else None
            return WeightSender(*model_shards(parameters, name, rank, location), *updates, base=base)
        from engine3d.reshard.transport.quantised import QuantisedWeights

        check_shards(self.spec, self.layout, transformer_engine=platform.has_transformer_engine)
        weights = QuantisedWeights(parameters, self.spec.hf_tensors, name, rank, location)
        updates.append(weights.quantise)  # of merged weights
        return WeightSender(weights.shards, weights.storages, *updates)

    def close(self) -> None:
        """End the model's process groups. Another engine may be built in this process after it."""
        gc.unfreeze()
        if self._host_state is not None:
            self._host_state.release()
        forget_pass(self.weighted)
        parallel.release()
