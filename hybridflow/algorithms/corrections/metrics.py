"""Diagnostics of a correction: per-sample columns computed where the tokens are, and metrics of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine3d.startup.lazy_imports import torch
from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.algorithms.corrections.weights import correct, log_ratios, sums_of
from hybridflow.algorithms.losses.kl import LOG_RATIO_LIMIT, kl_estimate
from hybridflow.algorithms.segments import segment_reduce
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics

if TYPE_CHECKING:
    from torch import Tensor

KEPT = "kept"
"""Per-sample column: tokens with a weight above 0."""


def correction_columns(batch: SampleBatch, *, config: AlgorithmSettings) -> Columns:
    """Compute column `correction_weights` of samples with `old_logprobs`, and the columns of `correction_metrics`.

    Raises:
        ValueError: samples without the trainer's log-probs.
    """
    settings = config.correction
    assert settings is not None
    if batch.old_logprobs is None:
        raise ValueError(
            "algorithm.correction needs old_logprobs, the trainer's log-probs before the first update: step.logprobs "
            "finds them"
        )
    mask, lengths = batch.response_mask, batch.response_lengths
    ratios = log_ratios(batch.old_logprobs, batch.logprobs, mask)
    correction = correct(ratios, mask, lengths, settings)
    weights = correction.weights.to(torch.float64)
    squares = (2 * ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).expm1()
    # Of tokens that the rollout policy drew: KL(rollout || trainer).
    k3 = kl_estimate(torch.zeros_like(ratios), ratios, "k3")
    per_sample = {
        "tokens": sums_of(mask, lengths),
        "log_ratio": sums_of(ratios, lengths),
        "k3": sums_of(k3, lengths),
        "chi_square": sums_of(squares, lengths),
        "weight": sums_of(weights, lengths),
        "weight_square": sums_of(weights.square(), lengths),
        "weight_min": segment_reduce(weights.where(mask, torch.inf), lengths, "min", initial=torch.inf),
        "weight_max": segment_reduce(weights.where(mask, -torch.inf), lengths, "max", initial=-torch.inf),
        "truncated": sums_of(correction.truncated, lengths),
        "low": sums_of(correction.low, lengths),
        "high": sums_of(correction.high, lengths),
        "vetoed": correction.vetoed.to(torch.float64),
        KEPT: sums_of(correction.weights > 0, lengths),
    }
    return Columns({"correction_weights": correction.weights}, per_sample=per_sample)


def correction_metrics(per_sample: Mapping[str, Tensor], settings: CorrectionSettings) -> dict[str, float]:
    """Return the metrics of a whole step, from (B,) float64 columns of its samples: none where no token counts.

    Over the N loss tokens of the M samples that have any, with rho as in `weights` and the weights w that enter the
    loss, W the mean of those of a sample:

        kl_k1                 mean of -log rho_t                  KL(rollout || trainer), as both are of drawn tokens
        kl_k3                 mean of rho_t - 1 - log rho_t
        chi_square_token      mean of rho_t^2 - 1                 chi^2(trainer || rollout)
        chi_square_sequence   mean of (prod_t rho_t)^2 - 1
        effective_tokens      (sum w)^2 / (N sum w^2)             Kish's effective sample size, as a share
        effective_samples     (sum W)^2 / (M sum W^2)

    Shares of truncated and masked are of tokens where their level is that of tokens, of samples otherwise. Products
    and ratios are raised from logarithms that are clamped, see `LOG_RATIO_LIMIT`.
    """
    some = per_sample["tokens"] > 0
    if not bool(some.any()):
        return {}
    of = {name: column[some] for name, column in per_sample.items()}
    tokens, samples = of["tokens"].sum(), int(some.sum())
    sequences = (2 * of["log_ratio"].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).expm1()
    means = of["weight"] / of["tokens"]
    values = {
        metrics.CORRECTION_KL_K1: -of["log_ratio"].sum() / tokens,
        metrics.CORRECTION_KL_K3: of["k3"].sum() / tokens,
        metrics.CORRECTION_CHI_SQUARE_TOKEN: of["chi_square"].sum() / tokens,
        metrics.CORRECTION_CHI_SQUARE_SEQUENCE: sequences.mean(),
        metrics.CORRECTION_EFFECTIVE_TOKENS: _effective(of["weight"].sum(), of["weight_square"].sum(), tokens),
        metrics.CORRECTION_EFFECTIVE_SAMPLES: _effective(means.sum(), means.square().sum(), samples),
        metrics.CORRECTION_WEIGHT_MEAN: of["weight"].sum() / tokens,
        metrics.CORRECTION_WEIGHT_MIN: of["weight_min"].min(),
        metrics.CORRECTION_WEIGHT_MAX: of["weight_max"].max(),
    }
    if settings.truncate is not None:
        values[metrics.CORRECTION_TRUNCATED] = _share(of["truncated"], of["tokens"], settings.weights)
    if settings.mask is not None:
        values[metrics.CORRECTION_MASKED_LOW] = _share(of["low"], of["tokens"], settings.mask)
        values[metrics.CORRECTION_MASKED_HIGH] = _share(of["high"], of["tokens"], settings.mask)
    if settings.veto is not None:
        values[metrics.CORRECTION_VETOED] = of["vetoed"].mean()
    if settings.leaves_out:
        values[metrics.CORRECTION_LOST_SAMPLES] = (of[KEPT] == 0).to(torch.float64).mean()
    return {name: float(value) for name, value in values.items()}


def _effective(total: Tensor, squares: Tensor, count: Tensor | int) -> Tensor:
    """Return the effective share, 0 where nothing has a weight."""
    return total.square() / (count * squares) if bool(squares > 0) else torch.zeros_like(total)


def _share(counts: Tensor, tokens: Tensor, level: str | None) -> Tensor:
    return counts.sum() / tokens.sum() if level == "token" else (counts > 0).to(torch.float64).mean()
