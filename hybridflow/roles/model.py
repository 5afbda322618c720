"""One rank of a Megatron-Core model, as a role of the dataflow."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from engine3d.checkpoint.manifest import FileEntry, RoleFacts
from engine3d.errors import DamagedCheckpointError, EngineError, UserError
from engine3d.models.experts.load_balance import Routing
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Place
from engine3d.startup.imports import quick_imports
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.flops import PASSES_OF_AN_UPDATE, sequence_flops
from engine3d.training.offload import OffloadFigures
from engine3d.training.sequences import Sequences
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics
from hybridflow.metrics.names import UpdateNames
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, THREE_D_PROTO, register

if TYPE_CHECKING:
    from engine3d.checkpoint.save import Begun
    from engine3d.training.forward import LossFunction
    from engine3d.training.update import UpdateGuard


@dataclass(frozen=True)
class Update:
    """What one data-parallel rank tells of one optimizer step."""

    statistics: Statistics
    grad_norm: float
    learning_rate: float
    applied: bool
    tokens: int
    positions: int
    peak_memory_bytes: int
    peak_reserved_bytes: int
    devices: int
    """Ranks that computed it together: those of one data-parallel replica."""
    flops: float
    """Of the model on its tokens, forward and backward, by `engine3d.training.flops`."""
    seconds: float
    optimizer_seconds: float
    """Of these, after the gradient's norm was known."""
    peak_flops: float | None
    """Of a device, a second; None where it is not known."""
    refused: bool = False
    """By the KL guard."""
    routing: Routing | None = None
    """Of the tokens of all ranks; None without experts."""
    on_gpu: bool = True
    """Whether the memory is a GPU's; the host's otherwise."""
    again: int | None = None
    """How often its micro-batches were computed again, for want of room for rows of experts; None without such room."""


@dataclass(frozen=True)
class CheckpointBegun:
    """What a rank tells of a save that has begun, and what a manifest is to say of the model."""

    begun: Begun
    facts: RoleFacts


@dataclass(frozen=True)
class CheckpointFailure:
    """Why a rank could not save or load a checkpoint: returned, not raised, since the run can do without this one."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> CheckpointFailure:
        """An error that is being handled; its stack goes into the rank's log."""
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        told: BaseException | None = error
        while told is not None and not isinstance(told, EngineError | UserError):
            told = told.__cause__ or told.__context__  # PyTorch's writer raises an error of its own after the file's
        message = " ".join(str(told or error).split())
        return cls(message if told is not None else f"{type(error).__name__}: {message}")


class ModelWorker:
    """One rank of a model: its start, its checkpoints and its export. What it computes is its kind's.

    Args:
        context: the rank, its layout and its place in it.
        directory: HuggingFace directory of the initial weights.
        config: how the model is trained.
        trainable: false for a model that stays as it is, such as a reference policy.
        seed: of the model's random states.
        places: where the memory of every rank is.
        publish: for every rank, the file in which a policy says where its weights lie, for engines that share them.
        checkpoint: the role's directory in a checkpoint that holds its state, in place of the initial weights.
        verify_checkpoint: whether what is read of it is compared with its checksums.
        saves_in_background: whether it is going to be saved while training goes on.
        offload: leave the device while others compute there.
    """

    _value_head: ClassVar[bool] = False

    def __init__(
        self,
        context: WorkerContext,
        directory: Path,
        config: TrainConfig,
        *,
        trainable: bool,
        seed: int,
        places: Sequence[Place],
        publish: Sequence[Path] = (),
        checkpoint: Path | None = None,
        verify_checkpoint: bool = True,
        saves_in_background: bool = False,
        offload: bool = False,
    ) -> None:
        self._layout, self._directory, self._config = context.layout, directory, config
        self._trainable, self._seed = trainable, seed
        self._name, self._rank, self._place = f"{context.role} rank {context.rank}", context.rank, places[context.rank]
        self._publish = publish[context.rank] if publish else None
        self._resumed, self._saves_in_background = checkpoint, saves_in_background
        self._verify = verify_checkpoint
        self._offload = offload

    @register(ONE_TO_ALL)
    def start(self) -> dict[str, str] | CheckpointFailure:
        """Join the group's process groups, build the model and load its weights or its whole state.

        Returns:
            The libraries that this rank found, by name; what is damaged of the checkpoint, if anything is.
        """
        with quick_imports():  # Megatron-Core is only imported where it runs
            from engine3d.checkpoint.save import EngineCheckpoint
            from engine3d.training.engine import TrainEngine

        self._engine = TrainEngine(
            self._directory,
            self._config,
            self._layout,
            value_head=self._value_head,
            trainable=self._trainable,
            seed=self._seed,
            load=self._resumed is None,
            offload=self._offload,
        )
        if self._trainable:
            self._checkpoint = EngineCheckpoint(self._engine)
            if self._resumed is not None:
                try:
                    self._checkpoint.load(self._resumed, verify=self._verify)
                except DamagedCheckpointError as error:
                    return CheckpointFailure(str(error))
        self._engine.give_back()  # engines that start meanwhile go by what is free
        return platform.libraries()

    @register(THREE_D_PROTO)
    def apply(self, batch: SampleBatch, *, function: Callable[..., Columns], arguments: Mapping[str, Any]) -> Columns:
        """`function(batch, **arguments)`, where the batch's columns are fetched."""
        return function(batch, **arguments)

    def _update(
        self,
        sequences: Sequences,
        loss: LossFunction,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        guard: UpdateGuard | None = None,
    ) -> Update:
        began = time.perf_counter()
        result = self._engine.update(sequences, loss, temperature=temperature, with_entropy=with_entropy, guard=guard)
        platform.synchronize()
        seconds = time.perf_counter() - began
        if self._saves_in_background:
            self._checkpoint.prepare()
        return Update(
            statistics=Statistics.merge(result.facts).cpu(),
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            applied=result.applied,
            tokens=result.tokens,
            positions=result.positions,
            peak_memory_bytes=result.peak_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            devices=self._layout.world_size // self._layout.dp,
            flops=PASSES_OF_AN_UPDATE * float(sequence_flops(self._engine.spec, sequences.lengths).sum()),
            seconds=seconds,
            optimizer_seconds=result.optimizer_s,
            peak_flops=platform.peak_flops,
            refused=result.refused,
            routing=result.routing,
            on_gpu=platform.gpus > 0,
            again=result.again,
        )

    @register(ONE_TO_ALL)
    def trace_next_update(self, path: Path, *, micro_batches: int) -> None:
        """Have the first rank's next update write a trace; see `TrainEngine.trace_next_update`."""
        if self._rank == 0:
            self._engine.trace_next_update(path, micro_batches)

    @register(ONE_TO_ALL)
    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Start the optimizer and its schedule afresh, with other settings."""
        self._checkpoint.forget()
        self._engine.reset_optimizer(config)

    @register(ONE_TO_ALL)
    def load(self, directory: Path) -> None:
        """Take the weights of a HuggingFace directory."""
        self._engine.load(directory)

    @register(ONE_TO_ALL)
    def restart_schedule(self) -> None:
        """Begin the learning-rate schedule again, warm-up included; the optimizer's moments stay."""
        self._engine.restart_schedule()

    @register(ONE_TO_ALL)
    def begin_checkpoint(self, directory: Path, *, background: bool) -> CheckpointBegun | CheckpointFailure:
        """Begin to save the model's state into a directory that is there; see `EngineCheckpoint.begin`."""
        try:
            facts = self._checkpoint.facts
            return CheckpointBegun(self._checkpoint.begin(directory, background=background), facts)
        except Exception as error:
            return CheckpointFailure.of(error)

    @register(ONE_TO_ALL)
    def checkpoint_written(self) -> bool:
        """Whether this rank has nothing left to write, or could not write it."""
        return self._checkpoint.is_written()

    @register(ONE_TO_ALL)
    def finish_checkpoint(self) -> list[FileEntry] | CheckpointFailure:
        """End the save; this rank's files, with paths relative to the directory."""
        try:
            return self._checkpoint.finish()
        except Exception as error:
            return CheckpointFailure.of(error)

    @register(ONE_TO_ALL)
    def abandon_checkpoint(self) -> None:
        """Give up the save that is under way, if there is one."""
        self._checkpoint.abandon()

    @register(ONE_TO_ALL, exclusive=True)
    def weights_digest(self) -> str:
        """Of the weights that this rank holds; see `engine3d.checkpoint.digest`."""
        from engine3d.checkpoint.digest import weights_digest

        return weights_digest(self._engine)

    @register(ONE_TO_ALL)
    def export(self, directory: Path) -> None:
        """Write the weights as a HuggingFace directory; every rank writes its own part."""
        self._engine.export(directory)

    @register(ONE_TO_ALL, exclusive=True)
    def give_back(self) -> None:
        """Give device memory to others that compute there; see `TrainEngine.give_back`."""
        self._engine.give_back()

    @register(ONE_TO_ALL, exclusive=True)
    def take_back(self) -> None:
        """Have on the device what is needed to compute; see `TrainEngine.take_back`."""
        self._engine.take_back()

    @register(ONE_TO_ALL)
    def take_offload_figures(self) -> OffloadFigures:
        """What this rank has moved to host memory and back since the last call."""
        return self._engine.take_offload_figures()

    def shutdown(self) -> None:
        """Leave the process groups."""
        from engine3d.training import parallel

        parallel.leave()


def update_metrics(updates: list[list[Update]], names: UpdateNames = metrics.ACTOR) -> dict[str, float]:
    """The figures of a step.

    Args:
        updates: for each optimizer step of the step, one entry a data-parallel rank.
        names: what figures that every kind of model has are called.
    """
    every = [update for ranks in updates for update in ranks]
    values = Statistics.merge(update.statistics for update in every).values(mini_batches=len(updates))
    values[names.gradient_norm] = sum(ranks[0].grad_norm for ranks in updates) / len(updates)
    values[names.learning_rate] = updates[-1][0].learning_rate
    values[names.skipped_updates] = sum(not ranks[0].applied for ranks in updates)
    values[names.padding_share] = 1 - sum(update.tokens for update in every) / sum(update.positions for update in every)
    peak_memory = max(update.peak_memory_bytes for update in every) / 2**20
    if every[0].on_gpu:
        values[names.gpu_memory] = peak_memory
        values[names.gpu_reserved] = max(update.peak_reserved_bytes for update in every) / 2**20
    else:
        values[names.host_memory] = peak_memory
    values[names.optimizer_time] = 1000 * sum(max(update.optimizer_seconds for update in ranks) for ranks in updates)
    if every[0].again is not None:
        values[names.again] = sum(ranks[0].again or 0 for ranks in updates)
    device_seconds = sum(max(update.seconds for update in ranks) * _devices(ranks) for ranks in updates)
    values[names.device_throughput] = sum(update.tokens for update in every) / device_seconds
    if (peak := every[0].peak_flops) is not None:
        values[names.mfu] = sum(update.flops for update in every) / (device_seconds * peak)
    return values | routing_metrics([ranks[0].routing for ranks in updates if ranks[0].routing is not None], names)


def routing_metrics(updates: Sequence[Routing], names: UpdateNames) -> dict[str, float]:
    """What routers did in the updates of a step; nothing for a model without experts."""
    if not updates:
        return {}
    layers = range(len(updates[0].layers))
    highest = [sum(each.highest[layer] for each in updates) / len(updates) for layer in layers]
    worst = max(layers, key=lambda layer: highest[layer])
    values = {
        names.expert_load_max: highest[worst],
        names.expert_load_max_layer: float(updates[0].layers[worst]),
        names.expert_load_max_mean: sum(highest) / len(highest),
        names.expert_load_min: min(min(each.lowest) for each in updates),
    }
    losses = {
        names.router_z_loss: [each.z for each in updates],
        names.sequence_balance_loss: [each.sequence for each in updates],
        names.update_balance_loss: [each.update for each in updates],
    }
    for name, found in losses.items():
        told = [each for each in found if each is not None]
        if told:
            values[name] = sum(told) / len(told)
    return values


def _devices(ranks: list[Update]) -> int:
    return sum(update.devices for update in ranks)
