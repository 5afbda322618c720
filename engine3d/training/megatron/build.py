"""A rank's shard of a model with the weights of a directory, and its memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine3d.layout import Layout
from engine3d.models import build_model, load_model_spec, load_weights
from engine3d.models.build import build_mtp, model_chunks, with_mtp
from engine3d.models.family import ModelSpec
from engine3d.models.lora.spec import AdapterSpec
from engine3d.platform import platform
from engine3d.training.config import TrainConfig
from engine3d.training.megatron import parallel
from engine3d.training.megatron.settings import check_options, megatron_settings
from engine3d.training.offload import Offload, OffloadStats

if TYPE_CHECKING:
    from engine3d.models.lora.modules import Adapters


class BuiltModel:
    """A rank's shard of a model, built and loaded. The arguments are those of `TrainEngine`."""

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
        self.config, self.layout, self.value_head = config, layout, value_head
        spec = config.fp8.applied(load_model_spec(model_directory, value_head=value_head))
        if trainable:
            spec = config.with_mtp(spec)
        spec.check_layout(layout)
        check_options(config, spec, layout, transformer_engine=platform.has_transformer_engine)
        if trainable:
            config.check_trained(spec.sizes, layout)
        self.spec = spec.of_trainer(layout, transformer_engine=platform.has_transformer_engine)
        if config.deterministic:
            platform.prepare_deterministic()
        self.coordinates = parallel.initialise(layout, seed=seed, timeout_s=config.timeout_s)
        self.dtype = getattr(torch, config.dtype)
        from megatron.core import parallel_state

        self.is_first_stage = parallel_state.is_pipeline_first_stage()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._dp_group = parallel_state.get_data_parallel_group()
        self._cp_group = parallel_state.get_context_parallel_group()
        module = self._build(spec)
        self.mtp: Any = self._build_mtp(module) if self.spec.mtp else None
        """The rank's part of the layer for multi-token prediction, if that is trained."""
        self.weighted: Any = module if self.mtp is None else with_mtp(module, self.mtp)
        """The rank's part of the model with that layer."""
        if load or (config.lora is not None and trainable):  # no checkpoint has the weights under adapters
            load_weights(self.weighted, self.spec, layout, self.coordinates, model_directory, needs_head=not trainable)
        self.trained: ModelSpec = self.spec
        """Specification of the weights that training changes and checkpoints hold: the model's, or its adapters'."""
        self.adapters: Adapters | None = None
        if config.lora is not None and trainable:
            from engine3d.models.lora.modules import Adapters

            adapters = AdapterSpec.of(self.spec, config.lora)
            start = config.lora.path if load else None
            self.adapters = Adapters(module, adapters, layout, self.coordinates, seed=seed, start=start)
            self.trained = adapters
        self.device = next(module.parameters()).device
        self._offload = Offload(self.device, constant=not trainable) if offload else None
        self.module: Any = module
        """The rank's part of the model (`build_model`), without what is wrapped around it for training."""
        self.chunks = model_chunks(module)
        """Megatron-Core's models of the rank's virtual stages, as its pipeline schedules take them."""
        self.megatron: Any = self.chunks[0].config
        """Megatron-Core's configuration of the model, which all chunks have in common."""
        self.optimizer: Any = None
        self.scheduler: Any = None

    def _build(self, spec: ModelSpec) -> Any:
        """Build the rank's part of the model. `spec`: of the model as its files have it."""
        config, layout = self.config, self.layout
        copies = config.has_copy_engine_dispatcher(spec.sizes, layout)
        with platform.shareable_memory():  # of buffers that engines read
            return build_model(
                self.spec,
                layout,
                self.dtype,
                overrides=megatron_settings(config, self.spec, layout),
                fused_experts=config.has_fused_experts(spec.sizes, layout),
                fused_query_key=config.fused_query_key,
                precision=config.precision,
                copy_engine_timeout_s=config.timeout_s if copies else None,
            )

    def _build_mtp(self, module: Any) -> Any:
        with platform.shareable_memory():
            return build_mtp(
                self.spec, self.layout, self.dtype, module, megatron_settings(self.config, self.spec, self.layout)
            )

    def onload(self) -> None:
        """Bring offloaded weights and optimizer back to the device."""
        if self._offload is not None:
            self._offload.onload()

    def where(self, tensor: Tensor) -> Tensor:
        """A tensor of the model or its optimizer, or the same elements in host memory, for reading."""
        return tensor if self._offload is None else self._offload.where(tensor)

    def take_offload_stats(self) -> OffloadStats:
        """Return the statistics of offloading since the last call."""
        return self._offload.take_stats() if self._offload is not None else OffloadStats()

    def _allocate_workspaces(self) -> None:
        """Allocate small tensors that stay, before they would lie in the memory of freed large ones."""
        platform.take_workspaces()
        if self.optimizer is not None and platform.has_transformer_engine:
            from engine3d.models.transformer_engine_modules import take_dummy_gradients

            take_dummy_gradients(self.module)
