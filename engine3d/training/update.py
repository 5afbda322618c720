"""Updates of a model: gradients over micro-batches, and one step of the optimizer."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
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
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from engine3d.training.forward import ForwardModel, LossFunction
from engine3d.training.host_state import HostState
from engine3d.training.optimizer import build_optimizer, element_bytes, of_buffers, wrap_for_training
from engine3d.training.profile import UpdateTrace
from engine3d.training.sequences import MicroBatch, Sequences


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step.

    Args:
        facts: what the loss function returned beside the loss, for each micro-batch of this rank; empty on ranks that
            are not on the last pipeline stage.
        grad_norm: global gradient norm before clipping.
        learning_rate: the rate that the step used.
        applied: False where the weights were left alone: the gradient was not finite, or the guard refused.
        refused: the guard did.
        tokens: of this data-parallel rank's sequences.
        positions: that the model computed for them, padding included.
        optimizer_s: seconds after the gradient's norm was known: the optimizer's step, and its state's way.
        peak_bytes: of device memory (of the host's on a CPU) that a rank of the model has had at most so far.
        peak_reserved_bytes: as `peak_bytes`, of what was taken of the device for tensors.
        routing: what the routers of all ranks did with the tokens of all ranks; None for a model without experts.
        again: how often all micro-batches were computed again, since there was too little room for rows of experts;
            None where room is made once their number is known.
    """

    facts: list[Any]
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
    again: int | None = None


@dataclass(frozen=True)
class UpdateGuard:
    """What an update is held against before it is made.

    Args:
        measure: from a rank's facts, the numerator and the denominator of a mean over tokens; both are added up over
            ranks.
        refuses: whether such a mean is too large.
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
        module = self.model
        if trainable:
            if self.spec.sizes.experts:
                from engine3d.models.experts.router import load_balance

                self._balance = load_balance(module, self.spec.sizes.sparse)
                if module.config.moe_router_enable_expert_bias:
                    self._bias_rate = module.config.moe_router_bias_update_rate
            with platform.shareable_memory():
                self.model = wrap_for_training(module, self.config)
            self._start_optimizer()
        else:
            self.model = module.eval().requires_grad_(False)

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
            guard: may refuse the update, by what the loss function found.
        """
        if self.optimizer is None:
            raise UserError("update: this model was built with trainable=False")
        from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

        self.take_back()
        self.model.restore_grad_buffers(synchronize=False)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = self.micro_batches(sequences)
        ahead = self._rows_ahead
        again_before = 0 if ahead is None else ahead.again
        learn = partial(self._run, batches, partial(self._loss, loss_function, temperature, with_entropy))
        facts, routing = self._learn_routing(sequences, batches, partial(learn, forward_only=False))
        learning_rate = float(get_canonical_lr_for_logging(self.optimizer.param_groups))
        # Looked at before `step`, which would write a gradient that is not finite into the weights.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        began = time.perf_counter()
        refused = guard is not None and self._refuses(guard, facts)
        if refused:
            self.restart_schedule()
        applied = math.isfinite(grad_norm) and not refused
        if applied:
            self.optimizer.step()
            self.scheduler.step(1)
            if self._balance is not None and self._bias_rate > 0:
                self._balance.move_biases(self._bias_rate)
        if applied and not self._settled:
            # What is there now stays. Python's collector would look at it again, for half a second, after every few
            # dozen micro-batches, on each rank at another time, and all would wait for it.
            gc.collect()
            gc.freeze()
            self._settled = True
        positions = sum(batch.positions for batch in batches)
        tokens, memory = sequences.tokens.numel(), self._most_memory()
        seconds = time.perf_counter() - began  # what came to the figures above has come to its end
        return UpdateResult(
            facts,
            grad_norm,
            learning_rate,
            applied,
            tokens,
            positions,
            seconds,
            *memory,
            refused,
            routing,
            None if ahead is None else ahead.again - again_before,
        )

    def _most_memory(self) -> tuple[int, int]:
        """Of all ranks: stages hold unlike parts of the model, and only the last one's figures reach the driver."""
        from megatron.core import parallel_state

        memory = platform.memory()
        peaks = torch.tensor([memory.peak, memory.peak_reserved], device=self.device)
        # A group that is used anyway: for each that is, NCCL takes memory.
        all_reduce(peaks, dist.ReduceOp.MAX, parallel_state.get_intra_distributed_optimizer_instance_group())
        peak, peak_reserved = map(int, peaks.tolist())
        return peak, peak_reserved

    def _learn_routing(
        self, sequences: Sequences, batches: list[MicroBatch], learn: Callable[[], list[Any]]
    ) -> tuple[list[Any], Routing | None]:
        """What `learn` returns, with the losses of routers among what is learned."""
        balance = self._balance
        if balance is None:
            return learn(), None
        tokens = torch.tensor(float(sequences.tokens.numel()), dtype=torch.float64, device=self.device)
        all_reduce(tokens, dist.ReduceOp.SUM, self._dp_group)
        if balance.losses.update:
            with torch.no_grad(), balance.counting():
                self._run(batches, self._nothing, forward_only=True)
        with balance.update(float(tokens), max(len(batch.indices) for batch in batches)):
            facts = learn()
        return facts, balance.finish()

    def _begin_again(self, *, learning: bool) -> None:
        super()._begin_again(learning=learning)
        if learning:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()

    def trace_next_update(self, path: Path, micro_batches: int) -> None:
        """Have the next update write a trace of some of its micro-batches on this rank; see `UpdateTrace`."""
        self._trace = UpdateTrace(path, micro_batches, ahead=self.layout.pp - 1 - self.coordinates.pp)

    def _refuses(self, guard: UpdateGuard, facts: list[Any]) -> bool:
        """What the guard says, on all ranks alike; tensor-parallel ranks count the same tokens as often each."""
        mean = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.is_last_stage:
            mean += torch.stack(guard.measure(facts)).to(mean)
        all_reduce(mean, dist.ReduceOp.SUM)
        return bool(mean[1]) and guard.refuses(float(mean[0] / mean[1]))

    def _start_optimizer(self) -> None:
        self.optimizer, self.scheduler = build_optimizer(self.model, self.config)
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
        for each in of_buffers(self.optimizer):
            for group in each.optimizer.param_groups:
                for parameter in group["params"]:
                    initialise(each.optimizer, parameter)

    def restart_schedule(self) -> None:
        """Begin the learning-rate schedule again, warm-up included; the optimizer's moments stay."""
        self.scheduler.step(-self.scheduler.num_steps)
