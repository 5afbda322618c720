"""Log-probs and entropies of next tokens from logits whose vocabulary is split over tensor-parallel ranks.

The full logits of a token are never gathered: ranks exchange a few numbers of each token, and of each chosen token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from engine3d.collectives import all_gather, all_reduce

# On a CPU tokens are processed in chunks, so that the float32 copies of the logits stay below this.
_CHUNK_BYTES = 512 << 20


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, softmax(logits / temperature).

        logprob = x[target] - log(sum(exp(x)))          entropy = log(sum(exp(x))) - sum(softmax(x) * x)

    A logit of -inf is a token that cannot be drawn: its probability, its term of the entropy (the limit of p log p) and
    its gradient are 0. The gradient of the entropies is only computed where a loss uses them.

    Args:
        logits: (N, V / tp) of any floating dtype, this rank's slice of the (padded) vocabulary; carries the gradient.
        targets: (N,) int64 global token ids.
        vocabulary: real vocabulary size; the columns past it are padding and get no probability.
        group: the tensor-parallel group.
        temperature: above 0.
        with_entropy: without it the entropies are zeros.
        overwrite: the backward pass may write the gradient over the logits, which are by far the largest tensor of a
            step; for logits that nothing else reads.

    Returns:
        (N,) float32 log-probs and (N,) float32 entropies in nats, the same on every rank of the group. Each rank may
        use them in a loss that all ranks compute alike: the gradient is that of its own logits.
    """
    settings = (vocabulary, group, temperature, with_entropy, overwrite)
    logprobs, entropy, _ = _LogProbs.apply(logits.contiguous(), targets, None, *settings)
    return logprobs, entropy


def logprobs_of_choices(
    logits: Tensor,
    targets: Tensor,
    choices: Tensor,
    *,
    vocabulary: int,
    group: ProcessGroup,
    temperature: float = 1.0,
    with_entropy: bool = True,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`logprobs_and_entropy`, with the log-probs of k further tokens of each distribution.

    One pass over the logits computes all of them, and one pass all gradients. The gradient at a chosen token is
    computed in float32 before it is rounded to the dtype of the logits.

    Args:
        choices: (N, k) int64 global token ids below `vocabulary`, all different in a row whose log-probs have a
            gradient.

    Returns:
        (N,) float32 log-probs of the targets, (N,) float32 entropies, (N, k) float32 log-probs of the choices.
    """
    settings = (vocabulary, group, temperature, with_entropy, overwrite)
    logprobs, entropy, chosen = _LogProbs.apply(logits.contiguous(), targets, choices, *settings)
    return logprobs, entropy, chosen


def top_tokens(logits: Tensor, count: int, *, vocabulary: int, group: ProcessGroup) -> Tensor:
    """The most likely tokens of each distribution, exactly: the `count` best of every rank's `count` best.

    Args:
        logits: (N, V / tp), this rank's slice of the (padded) vocabulary.
        count: of tokens, at most `vocabulary`.
        vocabulary, group: as in `logprobs_and_entropy`.

    Returns:
        (N, count) int64 global token ids by falling probability, the same on every rank. Of tokens with the same logit
        those of lower ranks come first.

    Raises:
        ValueError: `count` is not in 1..vocabulary.
    """
    if not 1 <= count <= vocabulary:
        raise ValueError(f"top_tokens: count is {count}, expected 1 to {vocabulary}, the tokens of the vocabulary")
    width = logits.shape[1]
    first = group.rank() * width
    real, candidates = max(0, min(width, vocabulary - first)), min(count, width)
    # A rank with fewer tokens has padding instead, after its tokens and so after those of all ranks.
    values = torch.full((logits.shape[0], candidates), -torch.inf, dtype=torch.float32, device=logits.device)
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    if real:
        best, at = logits.detach()[:, :real].topk(min(candidates, real), dim=1)
        values[:, : best.shape[1]], ids[:, : best.shape[1]] = best.float(), at + first
    values, ids = (torch.cat(all_gather(tensor, group), dim=1) for tensor in (values, ids))
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return ids.gather(1, order)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        choices: Tensor | None,
        vocabulary: int,
        group: ProcessGroup,
        temperature: float,
        with_entropy: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        shard = VocabularyShard.of(logits.shape[1], vocabulary, group, temperature)
        local, columns = targets - shard.first, None if choices is None else choices - shard.first
        at = None if columns is None else shard.at(logits, columns)
        result = shard.reduce(shard.softmax_stats(logits, local), local, at, columns, with_entropy=with_entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, columns, *result.kept)
        ctx.settings = (shard, with_entropy, overwrite)
        return result.logprobs, result.entropy, result.choices

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None, of_choices: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, local, columns, *kept = ctx.saved_tensors
        shard, with_entropy, overwrite = ctx.settings
        result = logits if overwrite else torch.empty_like(logits)
        slopes = Slopes.of(kept[0], of_logprob, of_entropy if with_entropy else None, of_choices)
        shard.write_gradient(logits, local, columns, kept, slopes, result)
        return result, *[None] * 7


class TokenStatistics(NamedTuple):
    """Statistics of N tokens over all ranks' slices, all float32.

    Args:
        logprobs: (N,) of the targets.
        entropy: (N,) in nats; zeros where it was not requested.
        choices: (N, k) log-probs of further tokens, or None.
        normaliser: (N,) log(sum(exp(x))).
    """

    logprobs: Tensor
    entropy: Tensor
    choices: Tensor | None
    normaliser: Tensor

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs of the gradient: the normaliser, the entropy, the log-probs of choices."""
        return self.normaliser, self.entropy, self.choices


class Slopes(NamedTuple):
    """Gradients of a loss by the outputs of N tokens, all float32.

    Args:
        of_logprob: (N,) by the target's log-prob.
        of_all: (N,) the sum over all log-probs of the row.
        of_entropy: (N,) by the entropy; None where no loss uses it.
        of_choices: (N, k) by the log-probs of choices; None where no loss uses them.
    """

    of_logprob: Tensor
    of_all: Tensor
    of_entropy: Tensor | None
    of_choices: Tensor | None

    @classmethod
    def of(
        cls, like: Tensor, of_logprob: Tensor | None, of_entropy: Tensor | None, of_choices: Tensor | None
    ) -> Slopes:
        """Convert the gradients of autograd, each of which may be None."""
        of_target = torch.zeros_like(like) if of_logprob is None else of_logprob.contiguous()
        of_all = of_target if of_choices is None else of_target + of_choices.sum(dim=1)
        return cls(of_target, of_all, None if of_entropy is None else of_entropy.contiguous(), of_choices)

    def rows(self, chunk: slice) -> Slopes:
        """Slopes of a chunk of the tokens."""
        return Slopes(*(None if slope is None else slope[chunk] for slope in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's slice of the vocabulary.

    Args:
        first: token id of its first column.
        real: number of its columns that are no padding.
        group: the tensor-parallel group.
        temperature: divisor of logits.
    """

    first: int
    real: int
    group: ProcessGroup
    temperature: float

    @classmethod
    def of(cls, width: int, vocabulary: int, group: ProcessGroup, temperature: float) -> VocabularyShard:
        """Make the shard of logits with `width` columns on each rank."""
        first = group.rank() * width
        return cls(first, max(0, min(width, vocabulary - first)), group, temperature)

    def softmax_stats(self, logits: Tensor, local: Tensor) -> Tensor:
        """(4, N) float32 of (N, V / tp) logits; see `vocab_kernels.softmax_stats`. A slice may be all padding."""
        return _softmax_stats(logits, local, self.real, self.temperature)

    def at(self, logits: Tensor, columns: Tensor) -> Tensor:
        """(N, k) float32 logits at (N, k) columns; anything where a column is another rank's."""
        return _at(logits, columns, self.real)

    def reduce(
        self, softmax_stats: Tensor, local: Tensor, at: Tensor | None, columns: Tensor | None, *, with_entropy: bool
    ) -> TokenStatistics:
        """Reduce the statistics of all slices.

        Args:
            softmax_stats: (4, N) of this rank, which are overwritten.
            local: (N,) columns of the targets.
            at, columns: (N, k) logits of choices and their columns; None without choices.
            with_entropy: without it the entropies are zeros.
        """
        real = self.real
        local_highest = softmax_stats[0].clone()
        all_reduce(softmax_stats[0], ReduceOp.MAX, self.group)
        highest, total, weighted, chosen = softmax_stats
        if real:  # in terms of the highest of all ranks
            # A slice of -inf alone adds nothing to the sums.
            down = (local_highest - highest).where(local_highest > -torch.inf, 0.0)
            weighted.add_(total * down).mul_(down.exp())
            total.mul_(down.exp())
            chosen.add_(torch.where((local >= 0) & (local < real), down, 0.0))
        all_reduce(softmax_stats[1:], ReduceOp.SUM, self.group)
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
        of_choices = None
        if at is not None and columns is not None:
            of_choices = at.div(self.temperature).sub(highest[:, None])
            of_choices = of_choices.where((columns >= 0) & (columns < real), 0.0)
            all_reduce(of_choices, ReduceOp.SUM, self.group)
            of_choices.sub_(log_total[:, None])
        return TokenStatistics(chosen - log_total, entropy, of_choices, highest + log_total)

    def write_gradient(
        self,
        logits: Tensor,
        local: Tensor,
        columns: Tensor | None,
        kept: Sequence[Tensor | None],
        slopes: Slopes,
        result: Tensor,
    ) -> None:
        """Write the gradient of (N, V / tp) logits to `result`, which may be the logits themselves.

        Args:
            local: (N,) columns of the targets.
            columns: (N, k) columns of the choices, or None.
            kept: `TokenStatistics.kept` of these tokens.
            slopes: of these tokens.
        """
        normaliser, entropy, chosen = kept
        assert normaliser is not None and entropy is not None
        arguments = (logits, local, self.real, self.temperature, normaliser, entropy, *slopes[:3], result)
        if logits.is_cuda:
            from engine3d.training.passes import vocab_kernels

            vocab_kernels.gradient(*arguments)
        else:
            _gradient(*arguments)
        if (of_choices := slopes.of_choices) is not None:
            assert columns is not None and chosen is not None
            _set_choices(result, local, self.real, self.temperature, entropy, *slopes[:3], columns, chosen, of_choices)


def _at(logits: Tensor, columns: Tensor, real: int) -> Tensor:
    """(N, k) float32 logits at (N, k) columns; anything where a column is another rank's."""
    if not real:
        return torch.zeros(columns.shape, dtype=torch.float32, device=logits.device)
    return logits.gather(1, columns.clamp(0, real - 1)).float()


def _set_choices(
    result: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    entropy: Tensor,
    of_logprob: Tensor,
    of_all: Tensor,
    of_entropy: Tensor | None,
    columns: Tensor,
    chosen: Tensor,
    of_choices: Tensor,
) -> None:
    """Write the gradient at the chosen tokens, which `_gradient` has made without their direct term, in place.

    Adding that term to a rounded value would lose the difference where the two cancel.

    Args:
        columns: (N, k) columns of the chosen tokens; one outside [0, real) is another rank's.
        chosen: (N, k) float32 log-probs of these.
        of_choices: (N, k) float32 gradient of these; the others as in `_gradient`.
    """
    scale = of_all[:, None]
    if of_entropy is not None:
        scale = scale + of_entropy[:, None] * (chosen + entropy[:, None]).where(chosen > -torch.inf, 0.0)
    direct = of_choices + of_logprob[:, None].where(columns == local[:, None], 0.0)
    slope = (direct - chosen.exp() * scale) / temperature
    rows, indices = ((columns >= 0) & (columns < real)).nonzero(as_tuple=True)
    result[rows, columns[rows, indices]] = slope[rows, indices].to(result.dtype)


def _softmax_stats(logits: Tensor, local: Tensor, real: int, temperature: float) -> Tensor:
    """Compute `vocab_kernels.softmax_stats`, also for slices that are all padding."""
    if real and logits.is_cuda:
        from engine3d.training.passes import vocab_kernels  # Triton is slow to import

        return vocab_kernels.softmax_stats(logits, local, real, temperature)
    softmax_stats = torch.zeros(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    highest, total, weighted, chosen = softmax_stats
    if not real:
        highest.fill_(-torch.inf)
        return softmax_stats
    for chunk in slices(len(logits), _CHUNK_BYTES // (4 * max(1, logits.shape[1]))):
        x = logits[chunk, :real].float().div(temperature)
        highest[chunk] = x.amax(dim=1)
        x.sub_(highest[chunk, None].where(highest[chunk, None] > -torch.inf, 0.0))
        e = x.exp()
        total[chunk] = e.sum(dim=1)
        weighted[chunk] = (e * x).where(x > -torch.inf, 0.0).sum(dim=1)
        at = x.gather(1, local[chunk].clamp(0, real - 1)[:, None]).squeeze(1)
        chosen[chunk] = torch.where((local[chunk] >= 0) & (local[chunk] < real), at, 0.0)
    return softmax_stats


def _gradient(
    logits: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    normaliser: Tensor,
    entropy: Tensor,
    of_logprob: Tensor,
    of_all: Tensor,
    of_entropy: Tensor | None,
    result: Tensor,
) -> None:
    """Compute `vocab_kernels.gradient` on a CPU."""
    for chunk in slices(len(logits), _CHUNK_BYTES // (4 * max(1, logits.shape[1]))):
        log_p = logits[chunk, :real].float().div(temperature).sub_(normaliser[chunk, None])
        scale = of_all[chunk, None]
        if of_entropy is not None:
            # d entropy / d x_j = -p_j (log p_j + entropy)
            scale = scale + of_entropy[chunk, None] * (log_p + entropy[chunk, None]).where(log_p > -torch.inf, 0.0)
        slope = log_p.exp_().mul_(scale).neg_()
        if real:
            mine = (local[chunk] >= 0) & (local[chunk] < real)
            add = torch.where(mine, of_logprob[chunk], 0.0)
            slope.scatter_add_(1, local[chunk].clamp(0, real - 1)[:, None], add[:, None])
        result[chunk, :real] = slope.div_(temperature).to(result.dtype)
        result[chunk, real:] = 0


def slices(count: int, most: int) -> list[slice]:
    """Slices of `count` tokens in order, each of max(1, most) tokens but for the last."""
    step = max(1, most)
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]
