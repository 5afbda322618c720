"""SAPO: GRPO with a soft gate in place of clipping (arXiv:2511.20347). Needs the roles that GRPO needs.

A token's gradient fades as its ratio leaves 1, sooner for negative advantages: a negative update raises all the tokens
that were not sampled, of which there are many.
"""

from __future__ import annotations

from pydantic import Field

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms import grpo
from hybridflow.algorithms.base import Algorithm
from hybridflow.algorithms.losses.aggregation import AggregationMode
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.algorithms.losses.weighted import gate_slope, soft_gate, token_ratios
from hybridflow.metrics import names as metrics


class SAPOSettings(grpo.GroupSettings):
    """Settings of SAPO."""

    name: str = "sapo"
    loss_aggregation: AggregationMode = "seq-mean-token-mean"
    gate_temperature_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate of tokens with a positive advantage: the larger, the sooner a gradient fades."""
    gate_temperature_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate of all other tokens; larger than the other in the paper."""


def sapo_loss(columns: TokenColumns, config: SAPOSettings) -> PolicyLoss:
    """Compute loss = -f(ratio) A, with `soft_gate` f at the temperature of the advantage's sign."""
    ratio = token_ratios(columns)
    positive, negative = config.gate_temperature_positive, config.gate_temperature_negative
    temperatures = torch.full_like(columns.advantages, negative).masked_fill(columns.advantages > 0, positive)
    loss = -soft_gate(ratio, temperatures) * columns.advantages
    stats = {metrics.TRAIN_GATE_SLOPE: gate_slope(ratio, temperatures).where(columns.loss_mask, 0.0)}
    return PolicyLoss(loss, ratio.detach(), stats)


ALGORITHM = Algorithm(SAPOSettings, grpo.make_experience, grpo.with_advantages, grpo.learn, policy_loss=sapo_loss)
