"""Log-probs and entropies of next tokens from logits whose vocabulary is split over tensor-parallel ranks.

The full logits of a token are never gathered: ranks exchange a few figures of each token, and of each chosen token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from engine3d.collectives import all_gather, all_reduce

# On a CPU tokens are worked through in pieces, so that the float32 copies of the logits stay below this.
_PIECE_BYTES = 512 << 20


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

    A logit of -inf is a token that cannot be drawn: its probability, its part of the entropy (the limit of p log p) and
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

    All come of one pass over the logits, and all gradients go into them in one; the gradient at a chosen token is
    computed in float32 before it is rounded to the dtype of the logits.

    Args:
        choices: (N, k) int64 global token ids below `vocabulary`, no two alike in a row whose log-probs have a
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
    real, held = max(0, min(width, vocabulary - first)), min(count, width)
    # A rank with fewer tokens than that has padding in their place, after its tokens and so after those of all ranks.
    values = torch.full((logits.shape[0], held), -torch.inf, dtype=torch.float32, device=logits.device)
    ids = torch.zeros(values.shape, dtype=torch.int64, device=logits.device)
    if real:
        best, at = logits.detach()[:, :real].topk(min(held, real), dim=1)
        values[:, : best.shape[1]], ids[:, : best.shape[1]] = best.float(), at + first
    values, ids = (torch.cat(all_gather(each, group), dim=1) for each in (values, ids))
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
        part = VocabularyPart.of(logits.shape[1], vocabulary, group, temperature)
        local, places = targets - part.first, None if choices is None else choices - part.first
        at = None if places is None else part.at(logits, places)
        found = part.of_all_ranks(part.facts(logits, local), local, at, places, with_entropy=with_entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, places, *found.kept)
        ctx.settings = (part, with_entropy, overwrite)
        return found.logprobs, found.entropy, found.choices

    @staticmethod
    def backward(
        ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None, of_choices: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, local, places, *kept = ctx.saved_tensors
        part, with_entropy, overwrite = ctx.settings
        result = logits if overwrite else torch.empty_like(logits)
        slopes = Slopes.of(kept[0], of_logprob, of_entropy if with_entropy else None, of_choices)
        part.write_gradient(logits, local, places, kept, slopes, result)
        return result, *[None] * 7


class OfTokens(NamedTuple):
    """What all ranks' slices together say of N tokens, all float32.

    Args:
        logprobs: (N,) of the targets.
        entropy: (N,) in nats; zeros where it was not asked for.
        choices: (N, k) log-probs of further tokens, or None.
        normaliser: (N,) log(sum(exp(x))).
    """

    logprobs: Tensor
    entropy: Tensor
    choices: Tensor | None
    normaliser: Tensor

    @property
    def kept(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the gradient is made from: the normaliser, the entropy, the log-probs of choices."""
        return self.normaliser, self.entropy, self.choices


class Slopes(NamedTuple):
    """The gradient of a loss by what is said of N tokens, all float32.

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
        """From the gradients that autograd gives, of which each may be None."""
        own = torch.zeros_like(like) if of_logprob is None else of_logprob.contiguous()
        of_all = own if of_choices is None else own + of_choices.sum(dim=1)
        return cls(own, of_all, None if of_entropy is None else of_entropy.contiguous(), of_choices)

    def rows(self, piece: slice) -> Slopes:
        """Of some of the tokens."""
        return Slopes(*(None if each is None else each[piece] for each in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's slice of the vocabulary.

    Args:
        first: token id of its first column.
        real: its columns that are no padding.
        group: the tensor-parallel group.
        temperature: that logits are divided by.
    """

    first: int
    real: int
    group: ProcessGroup
    temperature: float

    @classmethod
    def of(cls, width: int, vocabulary: int, group: ProcessGroup, temperature: float) -> VocabularyPart:
        """Of logits with so many columns on each rank."""
        first = group.rank() * width
        return cls(first, max(0, min(width, vocabulary - first)), group, temperature)

    def facts(self, logits: Tensor, local: Tensor) -> Tensor:
        """(4, N) float32 of (N, V / tp) logits, as `vocab_kernels.facts`, also for slices that are all padding."""
        return _facts(logits, local, self.real, self.temperature)

    def at(self, logits: Tensor, places: Tensor) -> Tensor:
        """(N, k) float32 logits at (N, k) columns; anything where a column is another rank's."""
        return _at(logits, places, self.real)

    def of_all_ranks(
        self, facts: Tensor, local: Tensor, at: Tensor | None, places: Tensor | None, *, with_entropy: bool
    ) -> OfTokens:
        """What all slices say together.

        Args:
            facts: (4, N) of this rank, which are overwritten.
            local: (N,) columns of the targets.
            at, places: (N, k) logits of choices and their columns; None without choices.
            with_entropy: without it the entropies are zeros.
        """
        real = self.real
        own = facts[0].clone()
        all_reduce(facts[0], ReduceOp.MAX, self.group)
        highest, total, weighted, chosen = facts
        if real:  # in terms of the highest of all ranks
            # A slice of -inf alone has no part in the sums.
            down = (own - highest).where(own > -torch.inf, 0.0)
            weighted.add_(total * down).mul_(down.exp())
            total.mul_(down.exp())
            chosen.add_(torch.where((local >= 0) & (local < real), down, 0.0))
        all_reduce(facts[1:], ReduceOp.SUM, self.group)
        log_total = total.log()
        entropy = log_total - weighted / total if with_entropy else torch.zeros_like(total)
        of_choices = None
        if at is not None and places is not None:
            of_choices = at.div(self.temperature).sub(highest[:, None])
            of_choices = of_choices.where((places >= 0) & (places < real), 0.0)
            all_reduce(of_choices, ReduceOp.SUM, self.group)
            of_choices.sub_(log_total[:, None])
        return OfTokens(chosen - log_total, entropy, of_choices, highest + log_total)

    def write_gradient(
        self,
        logits: Tensor,
        local: Tensor,
        places: Tensor | None,
        kept: Sequence[Tensor | None],
        slopes: Slopes,
        result: Tensor,
    ) -> None:
        """Write the gradient of (N, V / tp) logits to `result`, which may be the logits themselves.

        Args:
            local: (N,) columns of the targets.
            places: (N, k) columns of the choices, or None.
            kept: `OfTokens.kept` of these tokens.
            slopes: of these tokens.
        """
        normaliser, entropy, chosen = kept
        assert normaliser is not None and entropy is not None
        arguments = (logits, local, self.real, self.temperature, normaliser, entropy, *slopes[:3], result)
        if logits.is_cuda:
            from engine3d.training import vocab_kernels

            vocab_kernels.gradient(*arguments)
        else:
            _gradient(*arguments)
        if (of_choices := slopes.of_choices) is not None:
            assert places is not None and chosen is not None
            _set_choices(result, local, self.real, self.temperature, entropy, *slopes[:3], places, chosen, of_choices)


def _at(logits: Tensor, places: Tensor, real: int) -> Tensor:
    """(N, k) float32 logits at (N, k) columns; anything where a column is another rank's."""
    if not real:
        return torch.zeros(places.shape, dtype=torch.float32, device=logits.device)
    return logits.gather(1, places.clamp(0, real - 1)).float()


def _set_choices(
    result: Tensor,
    local: Tensor,
    real: int,
    temperature: float,
    entropy: Tensor,
    of_logprob: Tensor,
    of_all: Tensor,
    of_entropy: Tensor | None,
    places: Tensor,
    chosen: Tensor,
    of_choices: Tensor,
) -> None:
    """Write the gradient at the chosen tokens, which `_gradient` has made without their own part, in place.

    Adding that part to what is rounded already would lose what is left where the two cancel.

    Args:
        places: (N, k) columns of the chosen tokens; one outside [0, real) is another rank's.
        chosen: (N, k) float32 log-probs of these.
        of_choices: (N, k) float32 gradient of these; the others as in `_gradient`.
    """
    scale = of_all[:, None]
    if of_entropy is not None:
        scale = scale + of_entropy[:, None] * (chosen + entropy[:, None]).where(chosen > -torch.inf, 0.0)
    own = of_choices + of_logprob[:, None].where(places == local[:, None], 0.0)
    slope = (own - chosen.exp() * scale) / temperature
    rows, columns = ((places >= 0) & (places < real)).nonzero(as_tuple=True)
    result[rows, places[rows, columns]] = slope[rows, columns].to(result.dtype)


def _facts(logits: Tensor, local: Tensor, real: int, temperature: float) -> Tensor:
    """As `vocab_kernels.facts`, also for slices that are all padding."""
    if real and logits.is_cuda:
        from engine3d.training import vocab_kernels  # Triton is slow to import

        return vocab_kernels.facts(logits, local, real, temperature)
    facts = torch.zeros(4, logits.shape[0], dtype=torch.float32, device=logits.device)
    highest, total, weighted, chosen = facts
    if not real:
        highest.fill_(-torch.inf)
        return facts
    for piece in pieces(len(logits), _PIECE_BYTES // (4 * max(1, logits.shape[1]))):
        x = logits[piece, :real].float().div(temperature)
        highest[piece] = x.amax(dim=1)
        x.sub_(highest[piece, None].where(highest[piece, None] > -torch.inf, 0.0))
        e = x.exp()
        total[piece] = e.sum(dim=1)
        weighted[piece] = (e * x).where(x > -torch.inf, 0.0).sum(dim=1)
        at = x.gather(1, local[piece].clamp(0, real - 1)[:, None]).squeeze(1)
        chosen[piece] = torch.where((local[piece] >= 0) & (local[piece] < real), at, 0.0)
    return facts


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
    """As `vocab_kernels.gradient`."""
    for piece in pieces(len(logits), _PIECE_BYTES // (4 * max(1, logits.shape[1]))):
        log_p = logits[piece, :real].float().div(temperature).sub_(normaliser[piece, None])
        scale = of_all[piece, None]
        if of_entropy is not None:
            # d entropy / d x_j = -p_j (log p_j + entropy)
            scale = scale + of_entropy[piece, None] * (log_p + entropy[piece, None]).where(log_p > -torch.inf, 0.0)
        slope = log_p.exp_().mul_(scale).neg_()
        if real:
            mine = (local[piece] >= 0) & (local[piece] < real)
            add = torch.where(mine, of_logprob[piece], 0.0)
            slope.scatter_add_(1, local[piece].clamp(0, real - 1)[:, None], add[:, None])
        result[piece, :real] = slope.div_(temperature).to(result.dtype)
        result[piece, real:] = 0


def pieces(count: int, most: int) -> list[slice]:
    """The slices of `count` tokens in order, each of `most` of them, or of one if that is none, but for the last."""
    step = max(1, most)
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]
