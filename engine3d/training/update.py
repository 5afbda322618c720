"""Updates of a model: gradients over micro-batches, and one step of the optimizer."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.errors import UserError
from engine3d.models.experts.load_balance import Routing
from engine3d.models.experts.routing_replay import ReplayStats
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from engine3d.training.host_state import HostState
from engine3d.training.multi_token import MtpUpdate, MultiTokenTraining
from engine3d.training.optimizer import buffer_optimizers, build_optimizer, element_bytes, wrap_for_training
from engine3d.training.passes.forward import ForwardModel, LossFunction
from engine3d.training.passes.sequences import MicroBatch, Sequences
from engine3d.training.profile import UpdateTrace


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Args:
        loss_outputs: second result of the loss function for each micro-batch of this rank; empty on ranks that are not
            on the last pipeline stage.
        grad_norm: global gradient norm before clipping.
        learning_rate: the rate that the step used.
        applied: False where the weights were left alone: the gradient was not finite, or the guard refused.
        refused: True if the guard refused the update.
        tokens: of this data-parallel rank's sequences.
        positions: that the model computed for them, padding included.
        optimizer_s: seconds after the gradient's norm was known: the optimizer's step, and transfers of its state.
        peak_bytes: peak of device memory (of the host's on a CPU) so far, over the ranks of the model.
        peak_reserved_bytes: the same of memory reserved for tensors.
        routing: statistics of the routers, over the tokens of all ranks; None for a model without experts.
        replay: comparison of the sequences' routes with what the live routers chose; None for sequences without routes.
        bubble: `Layout.bubble` of the update; None without pipeline stages.
        split_share: share of this data-parallel rank's micro-batches whose sequences were split over context-parallel
            ranks; None without such ranks.
        recomputed: how often all micro-batches were computed again, because rows of experts exceeded their capacity;
            None where capacity is not predicted.
        mtp: update of the layer for multi-token prediction; None where none is trained.
    """

    loss_outputs: list[Any]
    grad_norm: float
    learning_rate: float
    applied: bool
    tokens: int
    positions: int
    optimizer_s: float
    peak_bytes: int
    peak_reserved_bytes: int
    refused: bool = False
    routing: Routing | None = None
    recomputed: int | None = None
    replay: ReplayStats | None = None
    bubble: float | None = None
    split_share: float | None = None
    mtp: MtpUpdate | None = None


@dataclass(frozen=True)
class UpdateGuard:
    """Condition under which an update is refused.

    Args:
        measure: numerator and denominator of a mean over tokens, from a rank's loss outputs. Both are summed over
            ranks.
        refuses: True if the mean is too large.
    """

    measure: Callable[[list[Any]], tuple[Tensor, Tensor]]
    refuses: Callable[[float], bool]


class TrainedModel(ForwardModel):
    """A model with its optimizer, where it is trainable. The arguments are those of `TrainEngine`."""

    def __init__(self, *args: Any, trainable: bool, **kwargs: Any) -> None:
        super().__init__(*args, trainable=trainable, **kwargs)
        self._settled = False
        self._host_state: HostState | None = None
        self._bias_rate = 0.0
        self._mtp: MultiTokenTraining | None = None
        if trainable:
            if self.spec.sizes.experts:
                from engine3d.models.experts.router import load_balance

                self._balance = load_balance(self.module, self.megatron, self.spec, self.layout)
                if self.megatron.moe_router_enable_expert_bias:
                    self._bias_rate = self.megatron.moe_router_bias_update_rate
            with platform.shareable_memory():
                self.chunks = wrap_for_training(self.module, self.config, self.adapters)
                if self.mtp is not None:
                    self._mtp = MultiTokenTraining(
                        self.mtp,
                        self.module,
                        self.config,
                        vocabulary=self.spec.vocab_size,
                        tp_group=self._tp_group,
                        dp_group=self._dp_group,
                    )
            self._start_optimizer()
        else:
            self.module.eval().requires_grad_(False)

    def update(
        self,
        sequences: Sequences,
        loss_function: LossFunction,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        guard: UpdateGuard | None = None,
    ) -> UpdateResult:
        """One optimizer step on this data-parallel rank's sequences, in as many micro-batches as they take.

        A gradient that is not finite leaves weights, expert biases, optimizer and schedule as they were. So does a
        guard that refuses the update, but that the schedule begins again.

        Args:
            sequences: with the columns that the loss function reads.
            loss_function: see LossFunction; called on the last pipeline stage.
            temperature: the logits are divided by it, as they were when the tokens were sampled.
            with_entropy: compute entropies, with their gradient.
            guard: may refuse the update, by the outputs of the loss function.
        """
        if self.optimizer is None:
            raise UserError("update: this model was built with trainable=False")
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        self.onload()
        for chunk in self.chunks:
            chunk.restore_grad_buffers(synchronize=False)
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if sequences.routes is None and self.config.routing_replay != "none":
            raise UserError(f"update: routing_replay={self.config.routing_replay} needs sequences with routes")
        batches = self.micro_batches(sequences)
        predicted = self._predicted
        recomputed_before = 0 if predicted is None else predicted.recomputed
        run = partial(self._run, batches, partial(self._loss, loss_function, temperature, with_entropy))
        learning = nullcontext() if self._mtp is None else self._mtp.update(batches, temperature)
        with self._routed(sequences, batches, forward_only=False), learning:
            loss_outputs, routing = self._run_with_routing(sequences, batches, partial(run, forward_only=False))
        mtp = None if self._mtp is None else self._mtp.finish()
        replay = self._replay.finish() if self._replay is not None and sequences.routes is not None else None
        learning_rate = float(get_canonical_lr_for_logging(self.optimizer.param_groups))
        # Looked at before `step`, which would write a gradient that is not finite into the weights.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        began = time.perf_counter()
        refused = guard is not None and self._is_refused(guard, loss_outputs)
        if refused:
            self.restart_schedule()
        applied = math.isfinite(grad_norm) and not refused
        if applied:
            self._step()
        positions = sum(batch.positions for batch in batches)
        tokens, memory = sequences.tokens.numel(), self._peak_memory()
        seconds = time.perf_counter() - began  # the values above have waited for the device
        return UpdateResult(
            loss_outputs,
            grad_norm,
            learning_rate,
            applied,
            tokens,
            positions,
            seconds,
            *memory,
            refused,
            routing,
            None if predicted is None else predicted.recomputed - recomputed_before,
            replay,
            self.layout.bubble(len(batches)) if self.layout.pp > 1 else None,
            sum(batch.split for batch in batches) / len(batches) if self.layout.cp > 1 else None,
            mtp,
        )

    def _step(self) -> None:
        """Apply the gradient to the weights, and move the schedule and the experts' biases."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.scheduler.step(1)
        if self._mtp is not None:
            self._mtp.step()
        if self._balance is not None and self._bias_rate > 0:
            self._balance.move_biases(self._bias_rate)
        if not self._settled:
            # Objects of the first update stay. Python's collector would traverse them, for half a second, after every
            # few dozen micro-batches, on each rank at another time, and all would wait for it.
            gc.collect()
            gc.freeze()
            self._settled = True

    def _peak_memory(self) -> tuple[int, int]:
        """Peak memory over all ranks: stages have different shards of the model."""
        from megatron.core import parallel_state

        memory = platform.memory()
        peaks = torch.tensor([memory.peak, memory.peak_reserved], device=self.device)
        # A group that is used anyway: NCCL takes memory for each.
        all_reduce(peaks, dist.ReduceOp.MAX, parallel_state.get_intra_distributed_optimizer_instance_group())
        peak, peak_reserved = map(int, peaks.tolist())
        return peak, peak_reserved

    def _run_with_routing(
        self, sequences: Sequences, batches: list[MicroBatch], run: Callable[[], list[Any]]
    ) -> tuple[list[Any], Routing | None]:
        """Call `run` with the losses of routers, and return its result and the routing statistics."""
        balance = self._balance
        if balance is None:
            return run(), None
        tokens = torch.tensor(float(sequences.tokens.numel()), dtype=torch.float64, device=self.device)
        all_reduce(tokens, dist.ReduceOp.SUM, self._dp_group)
        if balance.losses.update:
            with torch.no_grad(), balance.counting():
                self._run(batches, self._no_loss, forward_only=True)
        with balance.update(float(tokens), max(len(batch.indices) for batch in batches)):
            loss_outputs = run()
        return loss_outputs, balance.finish()

    def _reset_accumulators(self, *, learning: bool) -> None:
        super()._reset_accumulators(learning=learning)
        if learning:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            if self._mtp is not None:
                self._mtp.reset()

    def _after_forward(self, batch: MicroBatch) -> None:
        if self._mtp is not None:
            self._mtp.learn(batch)

    def trace_next_update(self, path: Path, micro_batches: int) -> None:
        """Write a trace of some micro-batches of the next update on this rank; see `UpdateTrace`."""
        self._trace = UpdateTrace(path, micro_batches, ahead=self.layout.passes_ahead(self.coordinates.pp))

    def _is_refused(self, guard: UpdateGuard, loss_outputs: list[Any]) -> bool:
        """True if the guard refuses, equal on all ranks. Tensor- and context-parallel ranks count the same tokens."""
        mean = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.is_last_stage:
            mean += torch.stack(guard.measure(loss_outputs)).to(mean)
        all_reduce(mean, dist.ReduceOp.SUM)
        return bool(mean[1]) and guard.refuses(float(mean[0] / mean[1]))

    def _start_optimizer(self) -> None:
        self.optimizer, self.scheduler = build_optimizer(self.chunks, self.config)
        self._settled = False
        settings = self.config.optimizer
        if settings.offload:
            itemsize = element_bytes(self.config).moments
            self._host_state = HostState(self.optimizer, self.device, itemsize, overlap=settings.overlap_offload)

    def _reset_optimizer(self, settings: OptimizerConfig) -> None:
        self.config = self.config.model_copy(update={"optimizer": settings})
        # Their memory, before the new ones take their own.
        if self._host_state is not None:
            self._host_state.release()
        self.optimizer = self.scheduler = self._host_state = None
        self._start_optimizer()
        if self._mtp is not None:
            self._mtp.start_optimizer(self.config)

    @property
    def gradient_chunks(self) -> list[Any]:
        """Everything wrapped for training: the model's chunks, and its layer for multi-token prediction."""
        return [*self.chunks, *([] if self._mtp is None else [self._mtp.chunk])]

    @property
    def optimizers(self) -> list[Any]:
        """Megatron-Core's optimizers of these; none of a model that is not trained."""
        return [trained.optimizer for trained in (self, self._mtp) if trained is not None and trained.optimizer]

    @property
    def schedulers(self) -> list[Any]:
        """Learning-rate schedules of these."""
        return [trained.scheduler for trained in (self, self._mtp) if trained is not None and trained.scheduler]

    @property
    def host_state(self) -> HostState | None:
        """The optimizer's state, if that is in host memory."""
        return self._host_state

    def make_optimizer_state(self, initialise: Callable[[Any, Tensor], None]) -> None:
        """Make the optimizer's state before its first step, where it is to be between updates.

        Args:
            initialise: gives one of PyTorch's optimizers the state of one of its parameters.
        """
        if self._host_state is not None:
            self._host_state.make(initialise)
            return
        for optimizer in self.optimizers:
            for of_buffer in buffer_optimizers(optimizer):
                for group in of_buffer.optimizer.param_groups:
                    for parameter in group["params"]:
                        initialise(of_buffer.optimizer, parameter)

    def restart_schedule(self) -> None:
        """Begin the learning-rate schedule again, warm-up included; the optimizer's moments stay."""
        for scheduler in self.schedulers:
            scheduler.step(-scheduler.num_steps)
