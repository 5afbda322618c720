"""Losses of preferences: functions of the log-probs of whole responses, two to each prompt.

The two responses of a pair may be in different micro-batches or on different ranks. So these functions are of sums of
log-probs alone, a few float64 values for each sample, and run in one process. `coefficients` gives what an update
needs of them: with c_i = d loss / d log pi(y_i) at the current weights, the loss sum_i c_i * log pi(y_i), which is a
plain sum over tokens, has the same gradient at these weights, whatever the layout and the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.losses.policy import PolicyLoss, TokenColumns
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class ResponsePairs:
    """Two responses to each of n prompts: the better and the worse one; or of unpaired examples the response, and one
    to another prompt, which is not trained on.

    Args:
        policy: (n, 2) float64: log-prob of each whole response by the policy.
        reference: (n, 2) float64: the same by the reference policy.
        tokens: (n, 2) int64: loss tokens of each.
        rewards: (n, 2) float32; of unpaired examples 1 where the response is desirable, 0 where it is not.
    """

    policy: Tensor
    reference: Tensor
    tokens: Tensor
    rewards: Tensor

    @classmethod
    def of_samples(cls, policy: Tensor, reference: Tensor, tokens: Tensor, rewards: Tensor) -> ResponsePairs:
        """Make pairs of (2n,) values of samples, the two of a prompt adjacent."""
        return cls(*(column.view(-1, 2) for column in (policy, reference, tokens, rewards)))


@dataclass(frozen=True, eq=False)
class PreferenceResult:
    """Losses and statistics of n prompts with two responses each.

    Args:
        losses: (n,) float64, whose mean is the loss; the only ones with a gradient.
        stats: (k,) float64 of some of the prompts, whose mean is a metric, by its name.
    """

    losses: Tensor
    stats: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Tensor]:
        """The losses too, by the names of metrics."""
        return {metrics.PREFERENCE_LOSS: self.losses.detach()} | {
            name: values.detach() for name, values in self.stats.items()
        }


PreferenceLoss = Callable[[ResponsePairs, Any], PreferenceResult]
"""(responses, settings of the algorithm) -> what is found of them."""


def coefficients(responses: ResponsePairs, loss: PreferenceLoss, config: Any) -> tuple[Tensor, PreferenceResult]:
    """Compute d (mean loss) / d (log-prob of each response), and the result of the loss.

    Returns:
        (n, 2) float64, and the losses and stats.
    """
    policy = responses.policy.detach().to(torch.float64).requires_grad_()
    result = loss(replace(responses, policy=policy), config)
    (gradient,) = torch.autograd.grad(result.losses.mean(), policy)
    return gradient, result


def coefficient_loss(columns: TokenColumns, _: Any) -> PolicyLoss:
    """Compute the loss -A_t * log pi(token_t), whose gradient is that of a loss of whole responses with -A =
    `coefficients`.

    Its value has no meaning: the responses' loss is known before the update.
    """
    return PolicyLoss(-columns.advantages * columns.logprobs, torch.ones_like(columns.advantages))


def pair_losses(
    margins: Tensor, *, beta: float, loss: Literal["sigmoid", "ipo"], label_smoothing: float = 0.0
) -> Tensor:
    """Compute the loss of each pair by its margin h, of any shape.

        h = (log pi(y_w) - log pi_ref(y_w)) - (log pi(y_l) - log pi_ref(y_l))

        sigmoid   -(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h)
        ipo       (h - 1 / (2 * beta))^2

    Sources: DPO, Rafailov et al., arXiv:2305.18290, eq. 7; e = label_smoothing, the share of pairs whose order is
    wrong, is "conservative DPO" (Mitchell, "A note on DPO with noisy preferences"); IPO, Azar et al., arXiv:2310.12036,
    eq. 17, whose tau is beta here.
    """
    if loss == "ipo":
        return (margins - 1 / (2 * beta)).square()
    scaled = beta * margins
    return -(1 - label_smoothing) * torch.nn.functional.logsigmoid(
        scaled
    ) - label_smoothing * torch.nn.functional.logsigmoid(-scaled)


def unpaired_losses(
    log_ratios: Tensor, desirable: Tensor, z0: Tensor, *, beta: float, weights: tuple[float, float]
) -> Tensor:
    """Compute KTO's loss of each response, of any one shape.

        r = log pi(y) - log pi_ref(y)
        loss = lambda_D * (1 - sigmoid(beta * (r - z0)))    desirable
        loss = lambda_U * (1 - sigmoid(beta * (z0 - r)))    undesirable

    Source: Ethayarajh et al., arXiv:2402.01306, eq. 8.

    Args:
        log_ratios: r of each.
        desirable: bool.
        z0: a scalar: how far the policy is from the reference; no gradient goes through it.
        beta: how averse to risk.
        weights: lambda_D and lambda_U.
    """
    good, bad = weights
    distance = beta * (log_ratios - z0.detach())
    return torch.where(desirable, good * torch.sigmoid(-distance), bad * torch.sigmoid(distance))


def divergence(log_ratios: Tensor) -> Tensor:
    """Compute KTO's z0: max(0, mean of log pi(y') - log pi_ref(y') over responses y' to other prompts), a scalar.

    Source: arXiv:2402.01306, section 4.1, where a micro-batch's responses are shifted by one; here the mean is over the
    mini-batch, so that it is the same on every layout, and which other prompt's response it is, the data fix.
    """
    return log_ratios.mean().clamp(min=0.0).detach()


def shares_above(values: Tensor, than: Tensor | float) -> Tensor:
    """Return 1 where a value is above, 1/2 where it is equal, 0 elsewhere: float64, of the shape of the values."""
    return ((values > than).double() + (values >= than).double()) / 2
