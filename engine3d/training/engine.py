"""One model on Megatron-Core: its log-probs and values, and updates of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import build_model, export_weights, load_model_spec, load_weights
from engine3d.models.load_balance import LoadBalance, Routing
from engine3d.models.router import load_balance
from engine3d.models.weights import rank_parameters
from engine3d.platform import platform
from engine3d.training import parallel
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.flops import sequence_flops
from engine3d.training.host_state import HostState
from engine3d.training.megatron_settings import check_options, megatron_settings
from engine3d.training.offload import Offload, OffloadFigures
from engine3d.training.optimizer import build_optimizer, element_bytes, of_buffers, wrap_for_training
from engine3d.training.profile import UpdateTrace
from engine3d.training.sequences import MicroBatch, Sequences, assign, least_micro_batches, micro_batch
from engine3d.training.vocab_parallel import logprobs_and_entropy

if TYPE_CHECKING:
    from engine3d.reshard.describe.shards import Place
    from engine3d.reshard.transport.sender import WeightSender


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of each of T tokens, and with a value head of each of K sequences.

    Figures of the first token of a sequence are 0.

    Args:
        logprobs: (T,) float32, or None for a model with a value head.
        entropy: (T,) float32 in nats of the distribution that the token was drawn from, or None.
        values: (T,) float32 of the state in which each token was chosen, or None for a language model.
        scores: (K,) float32 of the state that has read all of each sequence, or None for a language model.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None


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
        routing: what the routers of all ranks did with the tokens of all ranks; None for a model without experts.
    """

    facts: list[Any]
    grad_norm: float
    learning_rate: float
    applied: bool
    tokens: int
    positions: int
    refused: bool = False
    routing: Routing | None = None


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


LossFunction = Callable[[TokenOutputs, dict[str, Tensor]], tuple[Tensor, Any]]
"""(figures of T tokens, columns of T tokens) -> (scalar loss, facts). The gradient is that of the sum of the losses
over all micro-batches and data-parallel ranks: means are the caller's, by weights among the columns. Losses of routers
(`models.load_balance`) come on top of it."""


class TrainEngine:
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
        self.config, self.layout, self.value_head = config, layout, value_head
        spec = load_model_spec(model_directory, value_head=value_head)
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
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.is_first_stage = parallel_state.is_pipeline_first_stage()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        self._dp_group = parallel_state.get_data_parallel_group()
        with platform.shareable_memory():  # of buffers that engines read
            module = build_model(
                self.spec,
                layout,
                self.dtype,
                overrides=megatron_settings(config, self.spec, layout),
                one_step_experts=config.has_one_step_experts(spec.sizes, layout),
            )
        if load:
            load_weights(module, self.spec, layout, self.coordinates, model_directory, needs_head=not trainable)
        self.device = next(module.parameters()).device
        self._forward_backward = get_forward_backward_func()
        self.optimizer: Any = None
        self.scheduler: Any = None
        self._settled = False
        self._host_state: HostState | None = None
        self._trace: UpdateTrace | None = None
        self._balance: LoadBalance | None = None
        self._bias_rate = 0.0
        self._offload = Offload(self.device, constant=not trainable) if offload else None
        if trainable:
            if self.spec.sizes.experts:
                self._balance = load_balance(module, self.spec.sizes.sparse)
                if module.config.moe_router_enable_expert_bias:
                    self._bias_rate = module.config.moe_router_bias_update_rate
            with platform.shareable_memory():
                self.model = wrap_for_training(module, config)
            self._start_optimizer()
        else:
            self.model = module.eval().requires_grad_(False)
        self._take_what_stays()

    # Forward ---------------------------------------------------------------------------------------------------------

    def logprobs(
        self, sequences: Sequences, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenOutputs | None:
        """Log-probs (and entropies) of every token of this data-parallel rank's sequences, without gradients.

        Returns:
            Outputs in the order of the sequences' tokens, on the CPU; None on ranks not on the last pipeline stage.
        """
        if self.value_head:
            raise UserError("logprobs: this model has a value head in place of its vocabulary")
        return self._forward(sequences, temperature, with_entropy)

    def values(self, sequences: Sequences) -> TokenOutputs | None:
        """The value of the state in which every token was chosen, and the score of every sequence, without gradients.

        The value of a token is the head's output at the token before it, the score that at the sequence's last token.
        Returned as `logprobs` does.
        """
        if not self.value_head:
            raise UserError("values: this model has no value head")
        return self._forward(sequences, 1.0, False)

    def _forward(self, sequences: Sequences, temperature: float, with_entropy: bool) -> TokenOutputs | None:
        self.take_back()
        batches = self.micro_batches(sequences)

        def collect(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, TokenOutputs]:
            return torch.zeros((), device=self.device), outputs

        with torch.no_grad():
            results = self._run(batches, partial(self._loss, collect, temperature, with_entropy), forward_only=True)
        if not self.is_last_stage:
            return None
        names = ("values",) if self.value_head else ("logprobs", "entropy") if with_entropy else ("logprobs",)
        whole = {name: torch.zeros(sequences.tokens.numel()) for name in names}
        for batch, outputs in zip(batches, results, strict=True):
            for name, figures in whole.items():
                figures[batch.flat] = getattr(outputs, name).float().cpu()
        if self.value_head:
            whole["scores"] = torch.zeros(len(sequences))
            for batch, outputs in zip(batches, results, strict=True):
                whole["scores"][list(batch.indices)] = outputs.scores.float().cpu()
        return TokenOutputs(**whole)

    # Update ----------------------------------------------------------------------------------------------------------

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
        learn = partial(self._run, batches, partial(self._loss, loss_function, temperature, with_entropy))
        facts, routing = self._learn_routing(sequences, batches, partial(learn, forward_only=False))
        learning_rate = float(get_canonical_lr_for_logging(self.optimizer.param_groups))
        # Looked at before `step`, which would write a gradient that is not finite into the weights.
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
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
        tokens = sequences.tokens.numel()
        return UpdateResult(facts, grad_norm, learning_rate, applied, tokens, positions, refused, routing)

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

    def micro_batches(self, sequences: Sequences) -> list[MicroBatch]:
        """The sequences as micro-batches of like FLOPs, as many on every data-parallel rank."""
        lengths = sequences.lengths.tolist()
        costs = sequence_flops(self.spec, lengths).tolist()
        count = torch.tensor(least_micro_batches(lengths, self.config.micro_batch_tokens), device=self.device)
        all_reduce(count, dist.ReduceOp.MAX, self._dp_group)
        batches = assign(lengths, costs, self.config.micro_batch_tokens, at_least=max(1, int(count)))
        multiple = self.layout.tp if self.config.sequence_parallel else 1
        positions = [0] * len(batches)
        if self.config.gathers_tokens(self.layout):
            own = [sum(lengths[index] for index in indices) for indices in batches]
            most = torch.tensor(own, device=self.device)
            all_reduce(most, dist.ReduceOp.MAX, self._dp_group)
            positions = most.tolist()
        return [
            micro_batch(sequences, indices, packed=self.config.packing, multiple=multiple, positions=least)
            for indices, least in zip(batches, positions, strict=True)
        ]

    def _run(
        self,
        batches: list[MicroBatch],
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """All micro-batches through Megatron-Core's pipeline schedule; the facts of each, on the last stage."""

        def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data).to(self.device)
            arguments = {"packed_seq_params": _packed_parameters(batch), "padding_mask": self._sequences_of(batch)}
            return model(batch.input_ids, batch.position_ids, None, **arguments), partial(loss, batch)

        schedule = self._forward_backward
        if self._trace is not None and not forward_only:
            schedule, self._trace = partial(self._trace.run, schedule), None
        return schedule(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=forward_only,
        )

    def _sequences_of(self, batch: MicroBatch) -> Tensor | None:
        """(B, S), or (B, S / tp) where Megatron-Core does not cut it itself: what routers are to know of positions."""
        if self._balance is None or not self._balance.watches:
            return None
        if self.is_first_stage or not self.module.config.sequence_parallel:
            return batch.sequences
        return batch.sequences.chunk(self.layout.tp, dim=1)[self.coordinates.tp].contiguous()

    def _nothing(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
        return torch.zeros((), device=self.device), torch.zeros((), dtype=torch.int, device=self.device), None

    def _loss(
        self, loss_function: LossFunction, temperature: float, with_entropy: bool, batch: MicroBatch, output: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        if self.value_head:
            output = output.float()
            outputs = TokenOutputs(values=batch.figures(output), scores=batch.last_figures(output))
        else:
            logprobs, entropy = logprobs_and_entropy(
                output.view(-1, output.shape[-1]),
                batch.targets.view(-1),
                vocabulary=self.spec.vocab_size,
                group=self._tp_group,
                temperature=temperature,
                with_entropy=with_entropy,
                overwrite=True,
            )
            outputs = TokenOutputs(batch.figures(logprobs), batch.figures(entropy) if with_entropy else None)
        loss, facts = loss_function(outputs, batch.columns)
        return loss, torch.zeros((), dtype=torch.int, device=self.device), facts

    def give_back(self) -> None:
        """Free the memory that is only cached, and that of the gradients, which the next update takes again.

        With `offload` that of weights and optimizer too.
        """
        if self.optimizer is not None:
            self.model.offload_grad_buffers(synchronize=False, empty_cache=False)
        if self._offload is not None:
            self._offload.put_away(self._kept())
        platform.empty_cache()

    def take_back(self) -> None:
        """Have weights and optimizer on the device, where `offload` has taken them away."""
        if self._offload is not None:
            self._offload.bring_back()

    def where(self, tensor: Tensor) -> Tensor:
        """A tensor of the model or its optimizer; while it is away the same elements in host memory, for reading."""
        return tensor if self._offload is None else self._offload.where(tensor)

    def take_offload_figures(self) -> OffloadFigures:
        """What `offload` has moved since the last call."""
        return self._offload.take_figures() if self._offload is not None else OffloadFigures()

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

    def _reset_optimizer(self, settings: OptimizerConfig) -> None:
        self.config = self.config.model_copy(update={"optimizer": settings})
        # Their memory, before the new ones take their own.
        if self._host_state is not None:
            self._host_state.release()
        self.optimizer = self.scheduler = self._host_state = None
        self._start_optimizer()

    def _take_what_stays(self) -> None:
        """Before any call has made and freed large tensors: small ones that stay would lie in their memory."""
        platform.take_workspaces()
        if self.optimizer is not None and platform.has_transformer_engine:
            from engine3d.models.transformer_engine_modules import take_dummy_gradients

            take_dummy_gradients(self.module)

    def _start_optimizer(self) -> None:
        self.optimizer, self.scheduler = build_optimizer(self.model, self.config)
        self._settled = False
        if self.config.optimizer.offload:
            self._host_state = HostState(self.optimizer, self.device, element_bytes(self.config).moments)

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

    @property
    def module(self) -> Any:
        """Megatron-Core's model, without what is wrapped around it for training."""
        return self.model.module if self.optimizer is not None else self.model

    def close(self) -> None:
        """End the model's process groups. Another engine may be built in this process after it."""
        gc.unfreeze()
        if self._host_state is not None:
            self._host_state.release()
        parallel.release()


def _packed_parameters(batch: MicroBatch) -> Any:
    if batch.cu_seqlens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=batch.max_length,
        max_seqlen_kv=batch.max_length,
    )
