"""GSPO's losses (Zheng et al., arXiv:2507.18071): one ratio for all tokens of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.algorithms.losses.clipped import clip_stats, clipped_policy_loss
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns, sequence_means
from hybridflow.algorithms.settings import ClippedSettings

if TYPE_CHECKING:
    from torch import Tensor


def sequence_log_ratios(columns: TokenColumns) -> Tensor:
    """Compute for each token the mean log-ratio of its sequence over the n loss tokens; 0 where there are none.

    log s = 1/n sum_t (log pi(token_t) - log pi_old(token_t))       arXiv:2507.18071, eq. 7
    """
    return sequence_means(columns.logprobs - columns.old_logprobs, columns)


def gspo_loss(columns: TokenColumns, config: ClippedSettings) -> PolicyLoss:
    """Compute the clipped surrogate with the ratio s of the sequence in place of the token's (eq. 5).

        loss_t = -min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t)

    With loss_aggregation "seq-mean-token-mean" the losses of a sequence's tokens add up to eq. 5. Others weigh
    sequences by their lengths. `dual_clip` bounds the loss of a sequence of negative advantage, as it does with PPO.
    The clipped shares count tokens, all of a sequence at once; `ratio` is s.
    """
    return _clipped(sequence_log_ratios(columns), columns, config)


def gspo_token_loss(columns: TokenColumns, config: ClippedSettings) -> PolicyLoss:
    """Compute the token form (eq. 13, 14): the value of s, with the gradient of the token alone.

        s_t = sg[s] pi(token_t) / sg[pi(token_t)]

    Where all tokens of a sequence have one advantage, its value and its gradient are those of `gspo_loss`. It is for
    algorithms that have an advantage of its own for each token.
    """
    through = columns.logprobs - columns.logprobs.detach()
    return _clipped(sequence_log_ratios(columns).detach() + through, columns, config)


def _clipped(log_ratios: Tensor, columns: TokenColumns, config: ClippedSettings) -> PolicyLoss:
    clipped = clipped_policy_loss(
        log_ratios,
        log_ratios.new_zeros(log_ratios.shape),
        columns.advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    return PolicyLoss(clipped.loss, clipped.ratio, clip_stats(clipped))
