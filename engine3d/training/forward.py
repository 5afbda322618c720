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
from engine3d.models.experts.load_balance import LoadBalance
from engine3d.models.experts.room import RowsAhead
from engine3d.progress import progress
from engine3d.training.build import BuiltModel
from engine3d.training.flops import sequence_flops
from engine3d.training.logit_pieces import logprobs_of_states
from engine3d.training.profile import UpdateTrace
from engine3d.training.sequences import CHOSEN, MicroBatch, Sequences, assign, least_micro_batches, micro_batch
from engine3d.training.vocab_parallel import logprobs_and_entropy, logprobs_of_choices, top_tokens


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of each of T tokens, and with a value head of each of K sequences.

    Figures of the first token of a sequence are 0.

    Args:
        logprobs: (T,) float32, or None for a model with a value head.
        entropy: (T,) float32 in nats of the distribution that the token was drawn from, or None.
        values: (T,) float32 of the state in which each token was chosen, or None for a language model.
        scores: (K,) float32 of the state that has read all of each sequence, or None for a language model.
        sequences: (T,) int64 which of the K sequences each token belongs to; all tokens of a sequence are here.
        top_tokens: (T, k) int64 the most likely tokens in the place of each token, by falling probability, or None.
        chosen_logprobs: (T, k) float32 of the tokens in the column `CHOSEN`, or else of `top_tokens`, or None.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    scores: Tensor | None = None
    sequences: Tensor | None = None
    top_tokens: Tensor | None = None
    chosen_logprobs: Tensor | None = None


LossFunction = Callable[[TokenOutputs, dict[str, Tensor]], tuple[Tensor, Any]]
"""(figures of T tokens, columns of T tokens) -> (scalar loss, facts). The gradient is that of the sum of the losses
over all micro-batches and data-parallel ranks: means are the caller's, by weights among the columns. Losses of routers
(`models.experts.load_balance`) come on top of it."""


class ForwardModel(BuiltModel):
    """A model that computes. The arguments are those of `TrainEngine`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._forward_backward = get_forward_backward_func()
        self._trace: UpdateTrace | None = None
        self._balance: LoadBalance | None = None
        self._rows_ahead: RowsAhead | None = None
        if self.config.has_rows_ahead(self.spec.sizes, self.layout):
            from megatron.core import parallel_state

            from engine3d.models.experts.moe_layer import make_room

            everyone = parallel_state.get_intra_distributed_optimizer_instance_group()
            self._rows_ahead = RowsAhead(self.device, everyone)
            make_room(self.model, self._rows_ahead)

    def logprobs(
        self, sequences: Sequences, *, temperature: float = 1.0, with_entropy: bool = False, top: int = 0
    ) -> TokenOutputs | None:
        """Log-probs (and entropies) of every token of this data-parallel rank's sequences, without gradients.

        Args:
            sequences: with the column `CHOSEN` where the log-probs of further tokens are asked for.
            temperature: the logits are divided by it.
            with_entropy: compute entropies.
            top: how many of the most likely tokens in the place of each to find; with their log-probs, if there is no
                column `CHOSEN`.

        Returns:
            Outputs in the order of the sequences' tokens, on the CPU; None on ranks not on the last pipeline stage.
        """
        if self.value_head:
            raise UserError("logprobs: this model has a value head in place of its vocabulary")
        if not 0 <= top <= self.spec.vocab_size:
            raise UserError(f"logprobs: top is {top}, expected 0 to {self.spec.vocab_size}, the vocabulary")
        return self._forward(sequences, temperature, with_entropy, top)

    def values(self, sequences: Sequences) -> TokenOutputs | None:
        """The value of the state in which every token was chosen, and the score of every sequence, without gradients.

        The value of a token is the head's output at the token before it, the score that at the sequence's last token.
        Returned as `logprobs` does.
        """
        if not self.value_head:
            raise UserError("values: this model has no value head")
        return self._forward(sequences, 1.0, False)

    def _forward(
        self, sequences: Sequences, temperature: float, with_entropy: bool, top: int = 0
    ) -> TokenOutputs | None:
        self.take_back()
        batches = self.micro_batches(sequences)

        def collect(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, TokenOutputs]:
            return torch.zeros((), device=self.device), outputs

        with torch.no_grad():
            loss = partial(self._loss, collect, temperature, with_entropy, top=top)
            results = self._run(batches, loss, forward_only=True)
        if not self.is_last_stage:
            return None
        count, chosen = sequences.tokens.numel(), sequences.columns.get(CHOSEN)
        names = ("values",) if self.value_head else ("logprobs", "entropy") if with_entropy else ("logprobs",)
        whole = {name: torch.zeros(count) for name in names}
        if top:
            whole["top_tokens"] = torch.zeros(count, top, dtype=torch.int64)
        if top or chosen is not None:
            whole["chosen_logprobs"] = torch.zeros(count, top if chosen is None else chosen.shape[1])
        for batch, outputs in zip(batches, results, strict=True):
            for name, figures in whole.items():
                figures[batch.flat] = getattr(outputs, name).to(figures.dtype).cpu()
        if self.value_head:
            whole["scores"] = torch.zeros(len(sequences))
            for batch, outputs in zip(batches, results, strict=True):
                whole["scores"][list(batch.indices)] = outputs.scores.float().cpu()
        return TokenOutputs(**whole)

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
        """All micro-batches through the model; the facts of each, on the last stage."""
        results = self._pass(batches, loss, forward_only=forward_only)
        if self._rows_ahead is not None and self._rows_ahead.was_too_little():
            del results  # of as much memory as the next ones
            self._begin_again(learning=not forward_only)
            with self._rows_ahead.waiting():
                results = self._pass(batches, loss, forward_only=forward_only)
        return results

    def _begin_again(self, *, learning: bool) -> None:
        """Forget what the last pass has added up, with gradients if it was `learning`."""
        if self._balance is not None:
            self._balance.begin_again()

    def _pass(
        self,
        batches: list[MicroBatch],
        loss: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """By Megatron-Core's pipeline schedule."""

        def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(data).to(self.device)
            arguments = {"packed_seq_params": _packed_parameters(batch), "padding_mask": self._sequences_of(batch)}
            if self._in_pieces(batch):
                arguments["output_processor"] = self._states
            output = model(batch.input_ids, batch.position_ids, None, **arguments)
            progress.part_done()
            return output, partial(loss, batch)

        progress.count("micro-batches")
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

    def _in_pieces(self, batch: MicroBatch) -> bool:
        """Whether the output layer is applied to some of a micro-batch's tokens at a time."""
        most = self.config.logits_tokens
        return self.is_last_stage and not self.value_head and most is not None and batch.positions > most

    def _states(self, *, hidden_states: Tensor, output_layer: Any, **_: Any) -> Tensor:
        """(B, S, H) in place of the logits: what Megatron-Core's output layer would have read, on every rank whole."""
        from megatron.core.tensor_parallel import mappings

        if output_layer.sequence_parallel:
            states = mappings.gather_from_sequence_parallel_region(hidden_states, group=self._tp_group)
        else:
            states = mappings.copy_to_tensor_model_parallel_region(hidden_states, group=self._tp_group)
        return states.transpose(0, 1).contiguous()

    def _nothing(self, batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, None]:
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
            output = output.float().reshape(-1)
            outputs = TokenOutputs(
                values=batch.figures(output), scores=batch.last_figures(output), sequences=batch.members
            )
        else:
            of_tokens = self._of_states if self._in_pieces(batch) else self._of_logits
            choices = batch.columns.get(CHOSEN)
            outputs = of_tokens(
                batch,
                output.view(-1, output.shape[-1]),
                None if choices is None else batch.where_computed(choices),
                temperature,
                with_entropy,
                top,
            )
        loss, facts = loss_function(outputs, batch.columns)
        return loss, torch.zeros((), dtype=torch.int, device=self.device), facts

    def _of_logits(
        self,
        batch: MicroBatch,
        logits: Tensor,
        choices: Tensor | None,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> TokenOutputs:
        """What the logits of a language model, which nothing else reads, say of each token."""
        over: dict[str, Any] = {"vocabulary": self.spec.vocab_size, "group": self._tp_group}
        settings = {**over, "temperature": temperature, "with_entropy": with_entropy, "overwrite": True}
        targets = batch.targets.view(-1)
        best = top_tokens(logits, top, **over) if top else None
        places = best if choices is None else choices
        chosen = None
        if places is None:
            logprobs, entropy = logprobs_and_entropy(logits, targets, **settings)
        else:
            logprobs, entropy, chosen = logprobs_of_choices(logits, targets, places, **settings)
        return _outputs(batch, logprobs, entropy if with_entropy else None, chosen, best)

    def _of_states(
        self,
        batch: MicroBatch,
        states: Tensor,
        choices: Tensor | None,
        temperature: float,
        with_entropy: bool,
        top: int,
    ) -> TokenOutputs:
        """The same of what the output layer reads."""
        assert self.config.logits_tokens is not None
        module = self.module
        tied = module.share_embeddings_and_output_weights
        logprobs, entropy, chosen, best = logprobs_of_states(
            states,
            module.shared_embedding_or_output_weight() if tied else module.output_layer.weight,
            batch.targets.view(-1),
            choices,
            piece=self.config.logits_tokens,
            vocabulary=self.spec.vocab_size,
            group=self._tp_group,
            temperature=temperature,
            with_entropy=with_entropy,
            top=top,
        )
        return _outputs(batch, logprobs, entropy if with_entropy else None, chosen, best)


def _outputs(
    batch: MicroBatch, logprobs: Tensor, entropy: Tensor | None, chosen: Tensor | None, best: Tensor | None
) -> TokenOutputs:
    """Of the tokens of a micro-batch, from what was computed at its positions."""
    return TokenOutputs(
        batch.figures(logprobs),
        None if entropy is None else batch.figures(entropy),
        sequences=batch.members,
        top_tokens=None if best is None else batch.figures(best),
        chosen_logprobs=None if chosen is None else batch.figures(chosen),
    )


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
