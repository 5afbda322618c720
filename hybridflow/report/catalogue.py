"""Metrics that the page plots: in which plots they stand, and their names in words."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridflow.metrics import names as metrics
from hybridflow.metrics.evaluation_statistics import ACCURACY, PREFERENCE, REWARD, SCORE


@dataclass(frozen=True)
class MetricPlot:
    """A plot of metrics over the steps of a phase.

    Args:
        metrics: regular expressions, each of complete names.
        band: True for one standard deviation around the metric `<group>/mean`.
        may_be_logarithmic: True if the y axis is logarithmic where the values span decades.
        from_zero: True if the y axis begins at 0.
        split_scales: True if metrics of another scale, which would be flat lines here, get their own plots.
    """

    name: str
    title: str
    y_label: str
    metrics: tuple[str, ...]
    phase: str = "train"
    band: bool = False
    may_be_logarithmic: bool = False
    from_zero: bool = False
    split_scales: bool = False


def _evaluation(name: str, title: str, y_label: str, figure: str) -> MetricPlot:
    return MetricPlot(name, title, y_label, (metrics.of_set(metrics.EVAL, figure),), phase="eval")


EVALUATIONS = (
    _evaluation("accuracy", "Held-out accuracy", "accuracy", ACCURACY),
    _evaluation("eval-reward", "Mean reward of held-out prompts", "reward", REWARD),
    _evaluation("eval-score", "Mean score of held-out prompts by the reward model", "score", SCORE),
    _evaluation("eval-preference", "Accuracy on held-out pairs", "accuracy", PREFERENCE),
)
LEARNING = (
    MetricPlot("rewards", "Rewards", "reward", (metrics.REWARD_MEAN, "reward/[^/]+/mean"), band=True),
    MetricPlot("rewards-by-source", "Mean reward by source of the prompts", "reward", ("data/[^/]+/reward_mean",)),
    MetricPlot(
        "pass-at-k", "Sets of k responses with a right one", "share", (metrics.REWARD_PASS_AT_K,), from_zero=True
    ),
    MetricPlot("valid", "Samples of groups that differ", "share", (metrics.REWARD_VALID_FRACTION,), from_zero=True),
    *EVALUATIONS,
    MetricPlot(
        "preferences", "Preferences that became likelier", "share", (metrics.PREFERENCE_ACCURACY,), from_zero=True
    ),
    MetricPlot(
        "implicit-rewards",
        "Log-ratio to the reference, times beta",
        "nats per response",
        (r"preference/(?:chosen|rejected)_reward", metrics.PREFERENCE_MARGIN),
    ),
    MetricPlot(
        "preferred-responses",
        "Log-probs of responses",
        "nats per response",
        (r"preference/(?:chosen|rejected)_logprob",),
    ),
    MetricPlot(
        "undecided", "Groups without a difference", "groups", (metrics.PREFERENCE_WITHOUT_DIFFERENCE,), from_zero=True
    ),
    MetricPlot("costs", "Costs", "cost", ("cost/mean", "cost/[^/]+/mean"), band=True),
    MetricPlot("cost-multiplier", "Weight of the costs", "multiplier", (metrics.COST_MULTIPLIER,)),
    MetricPlot("warmup-loss", "Loss of the warm-up", "nats per token", (metrics.SFT_LOSS,), phase="sft"),
)
OPTIMISATION = (
    MetricPlot(
        "losses", "Loss of the actor", "loss", (metrics.TRAIN_LOSS, metrics.TRAIN_POLICY_LOSS), split_scales=True
    ),
    MetricPlot("clip-fraction", "Clipped tokens", "share", (r"train/clip_fraction_\w+",), from_zero=True),
    MetricPlot(
        "approximate-kl",
        "KL from the policy before the step, estimated",
        "nats per token",
        (r"train/approx_kl_\w+",),
        split_scales=True,
    ),
    MetricPlot("value-losses", "Loss of the critic", "loss", (metrics.CRITIC.value_loss,)),
    MetricPlot("cost-value-losses", "Loss of the cost critic", "loss", (metrics.COST_CRITIC.value_loss,)),
    MetricPlot("explained-variance", "Explained variance of the returns", "share", (r"\w+/explained_variance",)),
    MetricPlot("reference-kl", "KL from the reference", "nats per token", (metrics.TRAIN_REFERENCE_KL,)),
    MetricPlot(
        "kto-divergence", "KTO's z0: KL from the reference, at least 0", "nats per response", (metrics.PREFERENCE_Z0,)
    ),
    MetricPlot(
        "teacher-kl",
        "Divergence from the teacher",
        "nats per token",
        (r"distillation/kl_\w+", metrics.DISTILLATION_DIVERGENCE),
        split_scales=True,
    ),
    MetricPlot(
        "teacher-agreement", "Tokens that the teacher finds most likely", "share", (metrics.DISTILLATION_AGREEMENT,)
    ),
    MetricPlot("kl-coefficient", "Coefficient of the KL penalty", "coefficient", (metrics.TRAIN_KL_COEF,)),
    MetricPlot("entropy-coefficient", "Coefficient of the entropy bonus", "coefficient", (metrics.TRAIN_ENTROPY_COEF,)),
    MetricPlot("selected", "Tokens that the loss treats otherwise", "share", (metrics.TRAIN_SELECTED_FRACTION,)),
    MetricPlot("entropy", "Entropy of the policy", "nats per token", (metrics.TRAIN_ENTROPY,), from_zero=True),
    MetricPlot(
        "gradient-norm",
        "Norm of the gradient",
        "norm",
        (metrics.TRAIN_GRADIENT_NORM, r"\w+/gradient_norm"),
        may_be_logarithmic=True,
        from_zero=True,
    ),
    MetricPlot(
        "learning-rate",
        "Learning rate",
        "learning rate",
        (metrics.TRAIN_LEARNING_RATE, r"\w+/learning_rate"),
        split_scales=True,
    ),
)
EXPERTS = (
    MetricPlot(
        "expert-load",
        "Load of the most and the least loaded expert",
        "of the mean of its layer",
        (r"\w+/expert_load_max", r"\w+/expert_load_max_mean", r"\w+/expert_load_min"),
        from_zero=True,
    ),
    MetricPlot(
        "expert-load-entropy",
        "Entropy of the load of a layer's experts",
        "of that of an even load",
        (r"\w+/expert_load_entropy", r"\w+/expert_load_entropy_min"),
    ),
    MetricPlot("dead-experts", "Experts without a token", "experts", (r"\w+/dead_experts",), from_zero=True),
    MetricPlot(
        "expert-bias",
        "Largest less smallest expert bias of a layer",
        "bias",
        (r"\w+/expert_bias_spread", r"\w+/expert_bias_spread_mean"),
        from_zero=True,
    ),
    MetricPlot("balance-losses", "Balance losses of routers", "loss", (r"\w+/(sequence|update)_balance_loss",)),
    MetricPlot("router-z-loss", "z-loss of routers", "loss", (r"\w+/router_z_loss",)),
)
GENERATION = (
    MetricPlot(
        "mismatch",
        "Log-probs of SGLang against Megatron's",
        "absolute difference in nats",
        (metrics.MISMATCH_LOGPROB_MEAN, metrics.MISMATCH_LOGPROB_MAX),
        may_be_logarithmic=True,
        from_zero=True,
    ),
    MetricPlot(
        "correction-divergence",
        "Divergence of the trainer's policy from the engines'",
        "nats; variance of ratios",
        (r"correction/(?:kl_k[13]|chi_square_\w+)",),
        may_be_logarithmic=True,
    ),
    MetricPlot(
        "correction-weights",
        "Weights of the correction: effective share, shares truncated and left out",
        "share",
        (r"correction/effective_\w+", r"correction/\w+_fraction", metrics.CORRECTION_LOST_SAMPLES),
        from_zero=True,
    ),
    MetricPlot(
        "response-length", "Length of the responses", "tokens", (r"rollout/response_length_\w+",), from_zero=True
    ),
    MetricPlot("truncated", "Truncated responses", "share", (metrics.ROLLOUT_TRUNCATED,), from_zero=True),
    MetricPlot("prompts", "What became of a step's prompts", "prompts", (r"sampling/\w+_prompts",), from_zero=True),
    MetricPlot(
        "equal-groups",
        "Prompts whose responses have equal rewards",
        "share",
        (metrics.SAMPLING_ALL_RIGHT, metrics.SAMPLING_ALL_WRONG),
        from_zero=True,
    ),
    MetricPlot("replay-size", "Samples in the replay buffer", "samples", (metrics.REPLAY_SIZE,), from_zero=True),
    MetricPlot("replay-age", "Age of replayed samples", "versions", (metrics.REPLAY_AGE,), from_zero=True),
    MetricPlot("staleness", "Staleness of the policy", "versions", (r".*staleness.*",), from_zero=True),
    MetricPlot("sample-age", "From a response's end to the step", "s", (r"stream/sample_age_\w+",), from_zero=True),
    MetricPlot(
        "stream-requests",
        "Requests in flight, at most at each engine, and queued",
        "requests",
        (
            metrics.STREAM_REQUESTS_IN_FLIGHT,
            metrics.STREAM_REQUEST_LIMIT,
            metrics.STREAM_WAITING_REQUESTS,
            metrics.STREAM_QUEUED_REQUESTS,
        ),
        from_zero=True,
    ),
    MetricPlot(
        "engines",
        "Engines at work, their KV caches in use, and prompt tokens found there",
        "share",
        (metrics.STREAM_BUSY, r"stream/cache_use_\w+", metrics.STREAM_PREFIX_HITS, metrics.STREAM_WAIT_SHARE),
        from_zero=True,
    ),
    MetricPlot("mtp-loss", "Loss of the layer that drafts, of a token", "nats", (metrics.TRAIN_MTP_LOSS,)),
    MetricPlot(
        "mtp-gradient-norm",
        "Gradient norm of the layer that drafts",
        "norm",
        (metrics.TRAIN_MTP_GRADIENT_NORM,),
        from_zero=True,
    ),
    MetricPlot(
        "drafts",
        "Tokens of a forward pass that verifies drafts, mean of a request",
        "tokens",
        (metrics.ROLLOUT_ACCEPTANCE_LENGTH,),
        from_zero=True,
    ),
    MetricPlot(
        "stream-groups",
        "Groups evicted, dropped, carried, lost; requests retracted",
        "number",
        (r"stream/(?:evicted|dropped|carried|lost)_groups", metrics.STREAM_RETRACTED),
        from_zero=True,
    ),
)
SPEED = (
    MetricPlot("throughput", "Throughput of the rollout", "tokens/s", (metrics.ROLLOUT_THROUGHPUT,), from_zero=True),
    MetricPlot(
        "device-throughput",
        "Throughput of a device",
        "tokens/s and device",
        (r"\w+/device_tokens_per_sec",),
        from_zero=True,
    ),
    MetricPlot("mfu", "Model FLOP/s of what the devices can do", "share", (r"\w+/mfu",), from_zero=True),
    MetricPlot("memory", "Peak memory by role", "MiB", (r"memory/\w+_(?:gpu|host)_mem_mb",), from_zero=True),
)

_WORDS = (
    ("reward/mean", "mean of all samples"),
    (r"(?:reward|cost)/([^/]+)/mean", "{}"),
    ("cost/mean", "mean of all samples"),
    (r"data/([^/]+)/reward_mean", "{}"),
    ("reward/pass_at_k", "at least one of k is right"),
    ("reward/valid_fraction", "samples whose group has different rewards"),
    ("eval/accuracy", "accuracy"),
    ("eval/(?:reward|score)_mean", "mean reward"),
    ("sft/loss", "cross-entropy of the answers"),
    ("train/loss", "loss with all penalties"),
    ("train/policy_loss", "policy loss alone"),
    ("train/clip_fraction_low", "ratio below the lower bound"),
    ("train/clip_fraction_high", "ratio above the upper bound"),
    ("train/clip_fraction_dual", "second bound of negative advantages"),
    (r"train/approx_kl_k1", "estimate k1, of either sign"),
    (r"train/approx_kl_k3", "estimate k3, never below 0"),
    (r"(?:train|(\w+))/gradient_norm", "{} gradient norm"),
    (r"(?:train|(\w+))/learning_rate", "{} learning rate"),
    (r"(?:train|(\w+))/expert_load_max", "{} most loaded expert of any layer"),
    (r"(?:train|(\w+))/expert_load_max_mean", "{} most loaded expert, mean of layers"),
    (r"(?:train|(\w+))/expert_load_min", "{} least loaded expert"),
    (r"(?:train|(\w+))/expert_load_entropy", "{} mean of layers"),
    (r"(?:train|(\w+))/expert_load_entropy_min", "{} lowest of any layer"),
    (r"(?:train|(\w+))/dead_experts", "{} experts of all layers"),
    (r"(?:train|(\w+))/expert_bias_spread", "{} largest of any layer"),
    (r"(?:train|(\w+))/expert_bias_spread_mean", "{} mean of layers"),
    ("mismatch/logprob_abs_diff_mean", "mean of all tokens"),
    ("mismatch/logprob_abs_diff_max", "largest of a token"),
    (r"correction/kl_(k[13])", "KL, estimate {}"),
    (r"correction/chi_square_(\w+)", "chi-square by {}"),
    ("sampling/all_right_fraction", "all right"),
    ("sampling/all_wrong_fraction", "all wrong"),
    ("rollout/response_length_mean", "mean"),
    ("rollout/truncated_fraction", "responses that end at the longest length"),
    ("train/device_tokens_per_sec", "in updates"),
    ("step/device_tokens_per_sec", "of the whole step"),
    (r"memory/(\w+)_(?:gpu|host)_mem_mb", "{}"),
)
_ROLES = ("critic", "cost_critic")
"""Groups of metrics whose names recur in other groups."""
_UNITS = re.compile(r"_(?:tokens_per_sec|mean|ms|sec|fraction|share|mb)$")


def in_words(name: str) -> str:
    """Return the words for a metric; the name itself of anything else, such as "GPU 0"."""
    if "/" not in name:
        return name
    for pattern, words in _WORDS:
        if (match := re.fullmatch(pattern, name)) is not None:
            groups = (group or "" for group in match.groups())
            return words.format(*groups).replace("_", " ").strip()
    group, _, last = name.rpartition("/")
    return " ".join([*([group] if group in _ROLES else []), _UNITS.sub("", last)]).replace("_", " ")
