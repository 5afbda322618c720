"""One rank of a Megatron-Core model, as a role of the dataflow."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from engine3d.checkpoint.manifest import FileEntry, RoleSummary
from engine3d.errors import DamagedCheckpointError, EngineError, UserError
from engine3d.models.experts.load_balance import Routing
from engine3d.models.experts.routes import TokenRoutes
from engine3d.models.experts.routing_replay import ReplayStats
from engine3d.models.precision import Precision
from engine3d.platform import platform
from engine3d.reshard.describe.shards import Location
from engine3d.rollout.requests import BEGINS
from engine3d.startup.imports import quick_imports
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.flops import update_flops
from engine3d.training.offload import OffloadStats
from engine3d.training.passes.sequences import Sequences
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics
from hybridflow.metrics.expert_loads import routing_metrics
from hybridflow.metrics.names import UpdateNames
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, THREE_D_PROTO, register

if TYPE_CHECKING:
    from engine3d.checkpoint.writing.save import SaveStart
    from engine3d.training.multi_token import MtpUpdate
    from engine3d.training.passes.forward import LossFunction
    from engine3d.training.update import UpdateGuard


@dataclass(frozen=True)
class Update:
    """Metrics of one optimizer step on one data-parallel rank."""

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
    """FLOPs of the model on its tokens, forward and backward, by `engine3d.training.flops`."""
    seconds: float
    optimizer_seconds: float
    """Seconds of these after the gradient's norm was known."""
    peak_flops: float | None
    """Peak FLOPs of a device per second; None where it is not known."""
    refused: bool = False
    """True if the KL guard refused the step."""
    routing: Routing | None = None
    """Routing of the tokens of all ranks, from the first data-parallel rank; None from others, and without experts."""
    on_gpu: bool = True
    """True if the memory is a GPU's, False for the host's."""
    replay: ReplayStats | None = None
    """Comparison of its samples' routes with what live routers chose, of all ranks; None without routes."""
    again: int | None = None
    """Recomputations of its micro-batches for lack of row capacity of experts; None without a capacity."""
    bubble: float | None = None
    """Idle time of a rank over its computing time by the pipeline's schedule; None without pipeline stages."""
    split_share: float | None = None
    """Share of its micro-batches with split sequences; None without context-parallel ranks."""
    mtp: MtpUpdate | None = None
    """Update of the layer for multi-token prediction; None where none is trained."""


@dataclass(frozen=True)
class CheckpointBegun:
    """A rank's save that has begun, and the manifest's entry for the model."""

    begun: SaveStart
    summary: RoleSummary


@dataclass(frozen=True)
class CheckpointFailure:
    """Why a rank could not save or load a checkpoint: returned, not raised, since the run can do without this one."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> CheckpointFailure:
        """Make a failure of the error that is being handled. Its stack goes into the rank's log."""
        with contextlib.suppress(OSError):  # the log may be on the disk that is full
            traceback.print_exc()
        known: BaseException | None = error
        while known is not None and not isinstance(known, EngineError | UserError):
            known = known.__cause__ or known.__context__  # PyTorch's writer raises an error of its own after the file's
        message = " ".join(str(known or error).split())
        return cls(message if known is not None else f"{type(error).__name__}: {message}")


class ModelWorker:
    """One rank of a model: its start, its checkpoints and its export. A subclass adds what it computes.

    Args:
        context: the rank and its layout.
        directory: HuggingFace directory of the initial weights.
        config: how the model is trained.
        trainable: false for a model that stays as it is, such as a reference policy.
        seed: of the model's random states.
        locations: of the memory of every rank.
        publish: for every rank, the file in which a policy publishes the location of its weights, for engines that
            share them.
        engine_precision: of the engines' weights, where they are quantised.
        checkpoint: the role's directory in a checkpoint that holds its state, in place of the initial weights.
        verify_checkpoint: True to compare what is read of it with its checksums.
        saves_in_background: True if it is going to be saved while training continues.
        offload: True to leave the device while others compute there.
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
        locations: Sequence[Location],
        publish: Sequence[Path] = (),
        engine_precision: Precision | None = None,
        checkpoint: Path | None = None,
        verify_checkpoint: bool = True,
        saves_in_background: bool = False,
        offload: bool = False,
    ) -> None:
        self._layout, self._directory, self._config = context.layout, directory, config
        self._trainable, self._seed = trainable, seed
        self._name, self._rank, self._location = (
            f"{context.role} rank {context.rank}",
            context.rank,
            locations[context.rank],
        )
        self._publish = publish[context.rank] if publish else None
        self._engine_precision = engine_precision
        self._resumed, self._saves_in_background = checkpoint, saves_in_background
        self._verify = verify_checkpoint
        self._offload = offload

    @register(ONE_TO_ALL)
    def start(self) -> dict[str, str] | CheckpointFailure:
        """Join the group's process groups, build the model and load its weights or its whole state.

        Returns:
            The libraries of this rank, by name; or the failure to load a damaged checkpoint.
        """
        with quick_imports():  # Megatron-Core is only imported where it runs
            from engine3d.checkpoint.writing.save import EngineCheckpoint
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
        self._engine.offload()  # engines that start meanwhile go by what is free
        return platform.libraries()

    @register(THREE_D_PROTO)
    def apply(self, batch: SampleBatch, *, function: Callable[..., Columns], arguments: Mapping[str, Any]) -> Columns:
        """Return `function(batch, **arguments)`, where the batch's columns are fetched."""
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
            statistics=Statistics.merge(result.loss_outputs).cpu(),
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            applied=result.applied,
            tokens=result.tokens,
            positions=result.positions,
            peak_memory_bytes=result.peak_bytes,
            peak_reserved_bytes=result.peak_reserved_bytes,
            devices=self._layout.world_size // self._layout.dp,
            flops=float(
                update_flops(self._engine.spec, sequences.lengths, adapters=self._config.lora is not None).sum()
            ),
            seconds=seconds,
            optimizer_seconds=result.optimizer_s,
            peak_flops=platform.peak_flops,
            refused=result.refused,
            routing=result.routing if self._engine.coordinates.dp == 0 else None,
            on_gpu=platform.gpus > 0,
            replay=result.replay,
            again=result.recomputed,
            bubble=result.bubble,
            split_share=result.split_share,
            mtp=result.mtp,
        )

    @register(ONE_TO_ALL)
    def trace_next_update(self, path: Path, *, micro_batches: int) -> None:
        """Trace the first rank's next update; see `TrainEngine.trace_next_update`."""
        if self._rank == 0:
            self._engine.trace_next_update(path, micro_batches)

    @register(ONE_TO_ALL)
    def reset_optimizer(self, config: OptimizerConfig) -> None:
        """Reset the optimizer and its schedule, with other settings."""
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
            entry = self._checkpoint.summary
            return CheckpointBegun(self._checkpoint.begin(directory, background=background), entry)
        except Exception as error:
            return CheckpointFailure.of(error)

    @register(ONE_TO_ALL)
    def checkpoint_written(self) -> bool:
        """Return True once this rank has nothing left to write, or could not write it."""
        return self._checkpoint.is_written()

    @register(ONE_TO_ALL)
    def finish_checkpoint(self) -> list[FileEntry] | CheckpointFailure:
        """End the save. Return this rank's files, with paths relative to the directory."""
        try:
            return self._checkpoint.finish()
        except Exception as error:
            return CheckpointFailure.of(error)

    @register(ONE_TO_ALL)
    def abandon_checkpoint(self) -> None:
        """Abandon the save in flight, if there is one."""
        self._checkpoint.abandon()

    @register(ONE_TO_ALL, exclusive=True)
    def weights_digest(self) -> str:
        """Digest the weights of this rank; see `engine3d.checkpoint.digests.digest`."""
        from engine3d.checkpoint.digests.digest import weights_digest

        return weights_digest(self._engine)

    @register(ONE_TO_ALL)
    def export(self, directory: Path, precision: Precision | None = None, *, served: bool = False) -> None:
        """Write the weights as a HuggingFace directory, every rank its own part; see `TrainEngine.export`."""
        self._engine.export(directory, precision=precision, served=served)

    @register(ONE_TO_ALL, exclusive=True)
    def offload(self) -> None:
        """Offload, so that others that compute there have the device memory; see `TrainEngine.offload`."""
        self._engine.offload()

    @register(ONE_TO_ALL, exclusive=True)
    def onload(self) -> None:
        """Onload what is needed to compute; see `TrainEngine.onload`."""
        self._engine.onload()

    @register(ONE_TO_ALL)
    def take_offload_stats(self) -> OffloadStats:
        """Return this rank's moves to host memory and back since the last call."""
        return self._engine.take_offload_stats()

    def shutdown(self) -> None:
        """Leave the process groups."""
        from engine3d.training.megatron import parallel

        parallel.leave()


def update_metrics(updates: list[list[Update]], names: UpdateNames = metrics.ACTOR) -> dict[str, float]:
    """Compute the metrics of a step.

    Args:
        updates: for each optimizer step of the step, one entry a data-parallel rank.
        names: metric names of the model's kind.
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
        values[names.capacity_retries] = sum(ranks[0].again or 0 for ranks in updates)
    if every[0].bubble is not None:
        values[names.pipeline_bubble] = sum(ranks[0].bubble or 0.0 for ranks in updates) / len(updates)
    if every[0].split_share is not None:
        values[names.split_share] = sum(update.split_share or 0.0 for update in every) / len(every)
    if learned := [ranks[0].mtp for ranks in updates if ranks[0].mtp is not None]:
        values[metrics.TRAIN_MTP_LOSS] = sum(update.loss for update in learned) / len(learned)
        values[metrics.TRAIN_MTP_GRADIENT_NORM] = sum(update.grad_norm for update in learned) / len(learned)
    values |= replay_metrics([ranks[0].replay for ranks in updates])
    device_seconds = sum(max(update.seconds for update in ranks) * _devices(ranks) for ranks in updates)
    values[names.device_throughput] = sum(update.tokens for update in every) / device_seconds
    if (peak := every[0].peak_flops) is not None:
        values[names.mfu] = sum(update.flops for update in every) / (device_seconds * peak)
    return values | routing_metrics(routings(updates), names)


def routings(updates: list[list[Update]]) -> list[Routing]:
    """Return the routing of each optimizer step of a step; none for a model without experts."""
    return [ranks[0].routing for ranks in updates if ranks[0].routing is not None]


def _devices(ranks: list[Update]) -> int:
    return sum(update.devices for update in ranks)


def replay_metrics(updates: Sequence[ReplayStats | None]) -> dict[str, float]:
    """Compute the metrics of the routes of a step's updates; none for samples without routes."""
    stats = [update for update in updates if update is not None]
    decisions, missing, different = (
        sum(getattr(update, name) for update in stats) for name in ("decisions", "missing", "different")
    )
    values = {metrics.TRAIN_MISSING_ROUTES: missing / decisions} if decisions else {}
    if decisions > missing:
        values[metrics.TRAIN_DIFFERENT_ROUTES] = different / (decisions - missing)
    return values


def to_sequences(batch: SampleBatch, *, routes: TokenRoutes | None = None, **columns: Tensor) -> Sequences:
    """Lay out each sample as prompt and response, end to end: one sequence each, or several of a tree of tokens.

    Args:
        batch: the samples. A response token of version `BEGINS` begins another sequence of its sample.
        routes: experts of all tokens.
        columns: name to (R,) or (R, K) values of response tokens; prompt tokens get 0.
    """
    is_response, flat = batch.is_response, {}
    for name, column in columns.items():
        flat[name] = column.new_zeros(len(is_response), *column.shape[1:])
        flat[name][is_response] = column
    if routes is None:
        return Sequences(batch.tokens, _lengths(batch), flat)
    names = [f"sample {number}" for number in batch.sample_ids.tolist()]
    return Sequences(batch.tokens, batch.sequence_lengths, flat, names, routes)


def _lengths(batch: SampleBatch) -> Tensor:
    """(N,) int64 tokens of each sequence, of which a sample has one or more."""
    versions = batch.token_versions
    if versions is None or not bool((versions == BEGINS).any()):
        return batch.sequence_lengths
    begins = torch.zeros(len(batch.tokens), dtype=torch.bool)
    begins[batch.is_response] = versions == BEGINS
    begins[batch.sequence_lengths.cumsum(0) - batch.sequence_lengths] = True
    return begins.nonzero()[:, 0].diff(append=torch.tensor([len(batch.tokens)]))


def of_responses(batch: SampleBatch, outputs: Tensor, what: str) -> Tensor:
    """Select the response tokens' outputs: (T,) or (T, K) for `to_sequences(batch)` -> (R,) or (R, K) float32.

    Args:
        what: name of the outputs in the error.

    Raises:
        EngineError: the output for a token that the policy wrote is not finite; names its sample.
    """
    column = outputs[batch.is_response].float()
    of_tokens = column if column.dim() == 2 else column[:, None]
    bad = (~of_tokens.isfinite() & batch.response_mask[:, None]).nonzero()
    if len(bad):
        position, index = bad[0].tolist()
        sample, token = batch.place_of(position)
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[sample])} is {float(of_tokens[position, index])} at response "
            f"token {token}, expected a finite number"
        )
    return column


def finite_scores(batch: SampleBatch, scores: Tensor, what: str) -> Tensor:
    """Return (B,) scores of whole responses. Raises EngineError for one that is not finite, naming its sample."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise EngineError(
            f"{what} of sample {int(batch.sample_ids[row])} is {float(scores[row])}, expected a finite number"
        )
    return scores
