"""Micro-batches through a model: log-probs, values, and the losses that updates are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.errors import UserError
from engine3d.models.build import model_chunks
from engine3d.models.experts.load_balance import LoadBalance
from engine3d.models.experts.row_capacity import PredictedCapacity
from engine3d.models.precision import GEMM_TOKENS
from engine3d.platform import platform
from engine3d.progress import progress
from engine3d.training.flops import sequence_flops
from engine3d.training.passes.logit_chunks import logprobs_of_states
from engine3d.training.passes.micro_batch_plan import MicroBatchPlan
from engine3d.training.passes.routed_model import RoutedModel
from engine3d.training.passes.sequences import (
    CHOSEN,
    MicroBatch,
    Sequences,
    micro_batch,
    packed_positions,
)
from engine3d.training.passes.vocab_parallel import logprobs_and_entropy, logprobs_of_choices, top_tokens
from engine3d.training.profile import UpdateTrace


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of the model for each of T tokens, and with a value head for each of K sequences.

    Outputs of the first token of a sequence are 0.

    Args:
        logprobs: (T,) float32, or None for a model with a value head.
        entropy: (T,) float32 in nats of the distribution that the token was drawn from, or None.
        values: (T,) float32 of the state in which each token was chosen, or None for a language model.
        scores: (K,) float32 of the state after the last token of each sequence, or None for a language model.
        sequences: (T,) int64 the sequence of each token, of K; all tokens of a sequence are here.
        top_tokens: (T, k) int64 the most likely tokens at each position, by falling probability, or None.
        chosen_logprobs: (T, k) float32 of the tokens in the column `CHOSEN`, or else of `top_tokens`, or None.
        routes: (T, C) experts of each token, or None: one tensor- and context-parallel rank has them.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    sequences: Tensor | None = None
    top_tokens: Tensor | None = None
    chosen_logprobs: Tensor | None = None
    routes: Tensor | None = None


LossFunction = Callable[[TokenOutputs, dict[str, Tensor]], tuple[Tensor, Any]]
"""(outputs of T tokens, columns of T tokens) -> (scalar loss, further outputs). The gradient is that of the sum of the
losses over all micro-batches and data-parallel ranks. Tensor- and context-parallel ranks compute the same loss. Callers
form means by weights among the columns. Losses of routers (`models.experts.load_balance`) are added to it."""


class ForwardModel(RoutedModel):
    """A model that computes. The arguments are those of `TrainEngine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._forward_backward = get_forward_backward_func()
        self._trace: UpdateTrace | None = None
        self._balance: LoadBalance | None = None
        self._predicted: PredictedCapacity | None = None
        if self.config.has_predicted_capacity(self.spec.sizes, self.layout):
            from megatron.core import parallel_state

            from engine3d.models.experts.moe_layer import predict_capacity

            model_group = parallel_state.get_intra_distributed_optimizer_instance_group()
            self._predicted = PredictedCapacity(self.device, model_group)
            predict_capacity(self.module, self._predicted)

    def logprobs(
        self,
        sequences: Sequences,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        top: int = 0,
        record_routes: bool = False,
    ) -> TokenOutputs | None:
        """Log-probs (and entropies) of every token of this data-parallel rank's sequences, without gradients.

        Args:
            sequences: with the column `CHOSEN` where the log-probs of further tokens are requested. Tokens are routed
                by the sequences' routes, if there are any (`routing_replay`).
            temperature: the logits are divided by it.
            with_entropy: compute entropies.
            top: number of most likely tokens to find at each position; with their log-probs, if there is no column
                `CHOSEN`.
            record_routes: record the experts that the routers choose.

        Returns:
            Outputs in the order of the sequences' tokens, on the CPU; None on ranks not on the last pipeline stage.
        """
        if self.value_head:
            raise UserError("logprobs: this model has a value head in place of its vocabulary")
        if not 0 <= top <= self.spec.vocab_size:
            raise UserError(f"logprobs: top is {top}, expected 0 to {self.spec.vocab_size}, the vocabulary")
        return self._forward(sequences, temperature, with_entropy, top, record_routes)

    def values(self, sequences: Sequences) -> TokenOutputs | None:
        """The value of the state in which every token was chosen, and the score of every sequence, without gradients.

        The value of a token is the head's output at the token before it, the score that at the sequence's last token.
        Returned as `logprobs` does.
        """
        if not self.value_head:
            raise UserError("values: this model has no value head")
        return self._forward(sequences, 1.0, False)

    def _forward(
        self, sequences: Sequences, temperature: float, with_entropy: bool, top: int = 0, record_routes: bool = False
    ) -> TokenOutputs | None:
        self.onload()
        batches = self.micro_batches(sequences)

        def collect(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, TokenOutputs]:
            return torch.zeros((), device=self.device), outputs

        with torch.no_grad(), self._routed(sequences, batches, records=record_routes):
            loss = partial(self._loss, collect, temperature, with_entropy, top=top)
            results = self._run(batches, loss, forward_only=True)
            recorded = self._collect_routes() if record_routes else None
        if not self.is_last_stage:
            return None
        count, chosen = sequences.tokens.numel(), sequences.columns.get(CHOSEN)
        names = ("values",) if self.value_head else ("logprobs", "entropy") if with_entropy else ("logprobs",)
        columns = {name: torch.zeros(count) for name in names}
        if top:
            columns["top_tokens"] = torch.zeros(count, top, dtype=torch.int64)
        if top or chosen is not None:
            columns["chosen_logprobs"] = torch.zeros(count, top if chosen is None else chosen.shape[1])
        for batch, outputs in zip(batches, results, strict=True):
            for name, column in columns.items():
                column[batch.flat] = getattr(outputs, name).to(column.dtype).cpu()
        if self.value_head:
            columns["scores"] = torch.zeros(len(sequences))
            for batch, outputs in zip(batches, results, strict=True):
                columns["scores"][list(batch.indices)] = outputs.scores.float().cpu()
        return TokenOutputs(**columns, routes=recorded)

    def micro_batches(self, sequences: Sequences) -> list[MicroBatch]:
        """Cut the sequences into micro-batches of similar FLOPs, as many on every data-parallel rank.

        Context-parallel ranks, which have the same sequences, have their positions of the same micro-batches. They
        split the sequences of one, or have complete ones each (`MicroBatchPlan`).
        """
        cp, lengths = self.layout.cp, sequences.lengths.tolist()
        costs = sequence_flops(self.spec, lengths).tolist()
        plan = MicroBatchPlan(lengths, costs, self.config.micro_batch_tokens, cp)
        count = torch.tensor(plan.least, device=self.device)
        all_reduce(count, dist.ReduceOp.MAX, self._dp_group)
        # Interleaved stages take groups of pp micro-batches. Further ones are smaller, or empty.
        group = self.layout.micro_batch_group
        batches = plan.micro_batches(at_least=group * -(-max(1, int(count)) // group))
        multiple = (self.layout.tp if self.config.sequence_parallel else 1) * (1 if cp == 1 else 2 * cp)
        if self._has_quantised_gemms:
            multiple *= GEMM_TOKENS
        positions = [0] * len(batches)
        if self.config.gathers_tokens(self.layout):
            most = torch.tensor(
                [packed_positions(lengths, batch, multiple=multiple, cp=cp) for batch in batches], device=self.device
            )
            all_reduce(most, dist.ReduceOp.MAX, self._dp_group)
            positions = most.tolist()
        build = partial(
            micro_batch, sequences, packed=self.config.packing, multiple=multiple, cp=cp, cp_rank=self.coordinates.cp
        )
        return [build(batch, positions=least) for batch, least in zip(batches, positions, strict=True)]

    def _run(
        self,
        batches: list[MicroBatch],
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run all micro-batches through the model and return the loss outputs of each, on the last stage."""
        results = self._pass(batches, loss, forward_only=forward_only)
        if self._predicted is not None and self._predicted.overflowed():
            del results  # before the next ones take as much memory
            self._reset_accumulators(learning=not forward_only)
            with self._predicted.waiting():
                results = self._pass(batches, loss, forward_only=forward_only)
        return results

    def _reset_accumulators(self, *, learning: bool) -> None:
        """Reset the sums of the last pass, with gradients if it was `learning`."""
        if self._balance is not None:
            self._balance.reset()
        if self._replay is not None:
            self._replay.reset()

    def _pass(
        self,
        batches: list[MicroBatch],
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron-Core's pipeline schedule."""

        def forward_step(data: Iterator[tuple[int, MicroBatch]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, batch = next(data)
            batch, stage = batch.to(self.device), getattr(model, "module", model)
            positions = self._positions_of(number, batch, stage.pre_process)
            arguments = {"packed_seq_params": self._packed_parameters(batch), "padding_mask": positions}
            if stage.post_process and self._in_chunks(batch):
                arguments["output_processor"] = self._states
            output = model(batch.input_ids, batch.position_ids, None, **arguments)
            self._after_forward(batch)
            if self._routes is not None and model is self.chunks[-1]:
                self._routes.record(number)
            progress.batch_done()
            return output, partial(loss, batch)

        progress.count("micro-batches")
        schedule = self._forward_backward
        if self._trace is not None and not forward_only:
            schedule, self._trace = partial(self._trace.run, schedule), None
        iterators = [iter(enumerate(batches)) for _ in self.chunks]
        results = schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1] * self.layout.cp,
            micro_batch_size=batches[0].input_ids.shape[0],
            forward_only=forward_only,
        )
        if self._has_quantised_gemms:
            from engine3d.models.transformer_engine_modules import release_quantised_weights

            release_quantised_weights(self.module)
        return results

    def _after_forward(self, batch: MicroBatch) -> None:
        """Do nothing. A micro-batch has just passed through the model."""

    @property
    def _has_quantised_gemms(self) -> bool:
        """True if Transformer Engine multiplies quantised operands."""
        return self.config.precision is not None and platform.has_transformer_engine

    def _positions_of(self, number: int, batch: MicroBatch, embeds: bool) -> Tensor | None:
        """(B, S / cp), or (B, S / cp / tp) where Megatron-Core does not cut it itself: argument of `Router.locate`."""
        records_load = self._balance is not None and self._balance.is_recording
        if self._routes is None and not records_load:
            return None
        sequences = batch.sequences
        if not embeds and self.megatron.sequence_parallel:
            sequences = sequences.chunk(self.layout.tp, dim=1)[self.coordinates.tp].contiguous()
        return sequences if self._routes is None else self._routes.positions(number, sequences)

    def _in_chunks(self, batch: MicroBatch) -> bool:
        """True if the output layer is applied to chunks of a micro-batch's tokens."""
        most = self.config.logits_tokens
        return self.is_last_stage and not self.value_head and most is not None and batch.input_ids.numel() > most

    def _states(self, *, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
        """(B, S / cp, H) in place of the logits: input of Megatron-Core's output layer, complete on every tp rank."""
        from megatron.core.tensor_parallel import mappings

        if output_layer.sequence_parallel:
            states = mappings.gather_from_sequence_parallel_region(hidden_states, group=self._tp_group)
        else:
            states = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=self._tp_group)
        return states.transpose(0, 1).contiguous()

    def _no_loss(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
        return torch.zeros((), device=self.device), torch.zeros((), dtype=torch.int, device=self.device), None

    def _loss(
        self,
        loss_function: LossFunction,
        temperature: float,
        with_entropy: bool,
        batch: MicroBatch,
        output: Tensor,
        *,
        top: int = 0,
    ) -> tuple[Tensor, Tensor, Any]:
        if self.value_head:
            output = self._of_all_ranks(output.float().reshape(-1))
            outputs = TokenOutputs(
                values=batch.at_tokens(output), scores=batch.at_ends(output), sequences=batch.members
            )
        else:
            compute = self._outputs_of_states if self._in_chunks(batch) else self._outputs_of_logits
            choices = batch.columns.get(CHOSEN)
            outputs = compute(
                batch,
                output.view(-1, output.shape[-1]),
                None if choices is None else batch.at_positions(choices),
                temperature,
                with_entropy,
                top,
            )
        loss, loss_outputs = loss_function(outputs, batch.columns)
        return loss, torch.zeros((), dtype=torch.int, device=self.device), loss_outputs

    def _outputs_of_logits(
        self,
        batch: MicroBatch,
        logits: Tensor,
        choices: Tensor | None,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> TokenOutputs:
        """Outputs of each token from the logits of a language model, which nothing else reads."""
        over: dict[str, Any] = {"vocabulary": self.spec.vocab_size, "group": self._tp_group}
        settings = {**over, "temperature": temperature, "with_entropy": with_entropy, "overwrite": True}
        targets = batch.targets.view(-1)
        best = top_tokens(logits, top, **over) if top else None
        requested = best if choices is None else choices
        chosen = None
        if requested is None:
            logprobs, entropy = logprobs_and_entropy(logits, targets, **settings)
        else:
            logprobs, entropy, chosen = logprobs_of_choices(logits, targets, requested, **settings)
        return self._outputs(batch, logprobs, entropy if with_entropy else None, chosen, best)

    def _outputs_of_states(
        self,
        batch: MicroBatch,
        states: Tensor,
        choices: Tensor | None,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> TokenOutputs:
        """The same from the inputs of the output layer."""
        assert self.config.logits_tokens is not None
        module = model_chunks(self.module)[-1]
        tied = module.share_embeddings_and_output_weights
        logprobs, entropy, chosen, best = logprobs_of_states(
            states,
            module.shared_embedding_or_output_weight() if tied else module.output_layer.weight,
            batch.targets.view(-1),
            choices,
            chunk=self.config.logits_tokens,
            vocabulary=self.spec.vocab_size,
            group=self._tp_group,
            temperature=temperature,
            with_entropy=with_entropy,
            top=top,
        )
        return self._outputs(batch, logprobs, entropy if with_entropy else None, chosen, best)

    def _outputs(
        self, batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None, chosen: Tensor | None, best: Tensor | None
    ) -> TokenOutputs:
        """Outputs at the tokens of a micro-batch, from those at this rank's positions."""

        def at_tokens(computed: Tensor | None) -> Tensor | None:
            return None if computed is None else batch.at_tokens(self._of_all_ranks(computed))

        return TokenOutputs(
            at_tokens(logprobs),
            at_tokens(entropy),
            sequences=batch.members,
            top_tokens=at_tokens(best),
            chosen_logprobs=at_tokens(chosen),
        )

    def _of_all_ranks(self, computed: Tensor) -> Tensor:
        """(S / cp, ...) outputs at this rank's positions -> (S, ...) of all context-parallel ranks.

        Each of them computes the loss of all outputs, and takes back the gradient of its own. Gradients of weights are
        summed over these ranks as over data-parallel ones.
        """
        if self.layout.cp == 1:
            return computed
        from megatron.core.tensor_parallel import mappings

        return mappings.gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            computed, tensor_parallel_output_grad=False, group=self._cp_group
        )

    def _packed_parameters(self, batch: MicroBatch) -> Any:
        if batch.cu_seqlens is None:
            return None
        from megatron.core.packed_seq_params import PackedSeqParams

        arguments: dict[str, Any] = {}
        if batch.split:  # Transformer Engine asks for both bounds. One tensor says that there is nothing between them.
            arguments = {"cu_seqlens_q_padded": batch.cu_seqlens, "cu_seqlens_kv_padded": batch.cu_seqlens}
            arguments["cp_group"] = self._cp_group
        elif batch.cp > 1:
            arguments["local_cp_size"] = 1
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_length,
            max_seqlen_kv=batch.max_length,
            **arguments,
        )
