"""DPO: direct preference optimization (arXiv:2305.18290), and IPO (arXiv:2310.12036) as another loss of the same pairs.

From a file of pairs no engine and no reference role is needed: the reference's log-probs are the actor's own, before
its first update. From groups of responses, engines, rewards and a reference policy are.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from pydantic import Field

from hybridflow.algorithms.base import Algorithm, Experience, Step
from hybridflow.algorithms.losses.preference import (
    PreferenceResult,
    ResponsePairs,
    coefficient_loss,
    pair_losses,
    shares_above,
)
from hybridflow.algorithms.preferences import (
    PAIR,
    PreferenceSettings,
    learn,
    pairs_of_groups,
    prepare,
    with_advantages,
    with_reference,
)
from hybridflow.metrics import names as metrics


class DPOSettings(PreferenceSettings):
    """Settings of DPO and IPO."""

    name: str = "dpo"
    pairs: Literal["file", "group"] = "file"
    """Source of the pairs: "file", the data, without engines; "group", the best and the worst response of each group by
    their rewards.
    """
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """"sigmoid" is DPO's; "ipo" brings the margin of log-ratios to 1 / (2 beta)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of the pairs whose order is taken to be wrong (cDPO); only with "sigmoid"."""
    length_normalisation: bool = False
    """Divide the log-probs of each response by its tokens."""
    nll_coef: float = Field(default=0.0, ge=0)
    """Weight of the mean negative log-likelihood of the better response's tokens, added to the loss (RPO)."""

    @property
    def needs_reference(self) -> bool:
        """True if `ref_logprobs` are needed for every step's responses."""
        return self.pairs == "group"

    @property
    def needs_engines(self) -> bool:
        """True if responses are generated."""
        return self.pairs == "group"

    @property
    def smallest_group(self) -> int:
        """Two samples make a pair."""
        return 2 if self.pairs == "group" else 1

    @property
    def _unused(self) -> dict[str, str]:
        of_sigmoid = {"label_smoothing": self._other("loss 'sigmoid'")} if self.loss != "sigmoid" else {}
        return super()._unused | of_sigmoid


def dpo_loss(responses: ResponsePairs, config: DPOSettings) -> PreferenceResult:
    """Compute `pair_losses` of the margins, and the likelihood term.

        loss = pair_loss(h) - nll_coef * log pi(y_w) / |y_w|

    The second term is that of iterative RPO (Pang et al., arXiv:2404.19733, eq. 1): a mean over the tokens of each
    response, then over pairs; TRL's `rpo_alpha` takes the mean over all tokens of a micro-batch.

    With length_normalisation every log-prob is divided by the number of its response's tokens. IPO's paper has sums, as
    is the default here; TRL's "ipo" divides.
    """
    tokens = responses.tokens.clamp(min=1)
    log_ratios = responses.policy - responses.reference
    if config.length_normalisation:
        log_ratios = log_ratios / tokens
    margins = log_ratios[:, 0] - log_ratios[:, 1]
    losses = pair_losses(margins, beta=config.beta, loss=config.loss, label_smoothing=config.label_smoothing)
    if config.nll_coef:
        losses = losses - config.nll_coef * responses.policy[:, 0] / tokens[:, 0]
    return PreferenceResult(
        losses,
        {
            metrics.PREFERENCE_ACCURACY: shares_above(margins, 0.0),
            metrics.PREFERENCE_MARGIN: config.beta * margins,
            metrics.PREFERENCE_CHOSEN_REWARD: config.beta * log_ratios[:, 0],
            metrics.PREFERENCE_REJECTED_REWARD: config.beta * log_ratios[:, 1],
            metrics.PREFERENCE_CHOSEN_LOGPROB: responses.policy[:, 0],
            metrics.PREFERENCE_REJECTED_LOGPROB: responses.policy[:, 1],
        },
    )


def make_experience(step: Step[DPOSettings]) -> Experience:
    """Take the next pairs of the data, or make them from groups of responses to the next prompts."""
    draw = step.draw()
    if step.config.pairs == "file":
        return Experience(step.given(draw))
    return Experience(pairs_of_groups(step, step.rewards(step.generate(draw))))


ALGORITHM = Algorithm(
    DPOSettings,
    make_experience,
    with_advantages,
    learn,
    policy_loss=coefficient_loss,
    prepare=partial(prepare, loss=dpo_loss),
    together=PAIR,
    preference_loss=dpo_loss,
    read=with_reference,
)
