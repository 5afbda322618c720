"""Rewards of single tokens, and advantages from them and from a critic's values.

The policy's tokens of a response are the steps of an episode. Tokens outside the mask, which the policy did not write,
belong to the environment: what follows a loss token is the next loss token, however far away it stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.checks import check_finite, check_mask, check_rows, check_shapes

if TYPE_CHECKING:
    from torch import Tensor


def token_rewards(rewards: Tensor, response_mask: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """Compute the reward of each token: that of the response at its last loss token, less a KL penalty at every token.

        r_t = [t is the last loss token] * r - kl_coef * kl_t

    Sources: Ziegler et al., arXiv:1909.08593, section 2; InstructGPT, arXiv:2203.02155, section 3.5. For a cost, which
    is to be small, the penalty is added: give -kl_coef. A response without loss tokens gets zeros.

    `rewards` (B,) float32, `response_mask` (B, S') bool, `kl` (B, S') float32 of `kl_estimate` against the reference
    policy. Returns (B, S') float32, 0 outside the mask. Computed in float64. Raises ValueError for a reward or a
    loss token's divergence that is not finite, naming its row, and for columns of other shapes.
    """
    check_mask("token_rewards", response_mask)
    check_rows("token_rewards", rows=len(response_mask), rewards=rewards)
    check_shapes("token_rewards", dimensions=2, response_mask=response_mask, kl=kl)
    check_finite("token_rewards", "reward", rewards)
    if kl is not None:
        check_finite("token_rewards", "KL divergence", kl, response_mask)
    loss_tokens_from_here = response_mask.flip(1).cumsum(1).flip(1)
    is_last = response_mask & (loss_tokens_from_here == 1)
    reward = rewards.to(torch.float64)[:, None].where(is_last, 0.0)
    if kl is not None:
        reward = reward - kl_coef * kl.to(torch.float64).where(response_mask, 0.0)
    return reward.to(torch.float32)


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Compute the lambda of each response of VAPO, by its length l: the longer, the further its advantages look.

        lambda = max(1 - 1 / (alpha * l), 0)

    so that sum_t lambda^t = 1 / (1 - lambda) = alpha * l. Source: arXiv:2504.05118, section 4.2, with alpha = 0.05; it
    does not say what holds for l < 1 / alpha, where the formula is below 0: one-step advantages (lambda 0) here.

    `lengths` (B,) int64: the loss tokens of each response. Returns (B,) float64; 0 for a response without any.
    """
    check_rows("length_adaptive_lambda", rows=len(lengths), lengths=lengths)
    return (1 - 1 / (alpha * lengths.to(torch.float64).clamp(min=1))).clamp(min=0.0)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates, and the returns that the critic is trained on.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = sum_l (gamma * lam)^l delta_{t+l}
        R_t     = A_t + V_t

    Source: Schulman et al., arXiv:1506.02438, section 3. t counts the tokens in the mask only. The value after the last
    of them is 0, also where the response was cut off at its length limit.

    `token_rewards` and `values` (B, S') float32, `response_mask` (B, S') bool; `lam` one value, or (B,) float64 of the
    responses, as VAPO has it (`length_adaptive_lambda`). Returns advantages and returns, each
    (B, S') float32, 0 outside the mask. Computed in float64. Raises ValueError for columns of other shapes, and for a
    reward or value of a loss token that is not finite, naming row and token: it would spoil the whole row and,
    whitened, the whole batch.
    """
    check_mask("gae_advantages", response_mask)
    check_shapes(
        "gae_advantages", dimensions=2, response_mask=response_mask, token_rewards=token_rewards, values=values
    )
    check_finite("gae_advantages", "reward", token_rewards, response_mask)
    check_finite("gae_advantages", "value", values, response_mask)
    if isinstance(lam, torch.Tensor):
        check_rows("gae_advantages", rows=len(response_mask), lam=lam)
    # One row a token, so that each step of the loop reads and writes contiguous memory.
    loss_mask = response_mask.T.contiguous()
    reward = token_rewards.to(torch.float64).T.contiguous()
    value = values.to(torch.float64).T.where(loss_mask, 0.0)
    advantages = torch.zeros_like(value)
    next_value = next_advantage = value.new_zeros(value.shape[1])
    for t in reversed(range(len(value))):
        advantage = reward[t] + gamma * next_value - value[t] + gamma * lam * next_advantage
        next_advantage = advantage.where(loss_mask[t], next_advantage)
        next_value = value[t].where(loss_mask[t], next_value)
        advantages[t] = advantage.where(loss_mask[t], 0.0)
    returns = advantages + value
    return advantages.T.to(torch.float32).contiguous(), returns.T.to(torch.float32).contiguous()
