"""Metrics in words, for legends."""

from __future__ import annotations

import re

_WORDS = (
    ("reward/mean", "mean of all samples"),
    (r"(?:reward|cost)/([^/]+)/mean", "{}"),
    ("cost/mean", "mean of all samples"),
    (r"data/([^/]+)/reward_mean", "{}"),
    ("reward/pass_at_k", "at least one of k is right"),
    ("reward/valid_fraction", "samples whose group has different rewards"),
    ("eval/(?:training_)?accuracy", "accuracy"),
    ("eval/(?:training_)?(?:reward|score)_mean", "mean reward"),
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
    """The words for a metric; the name itself where it is no metric, such as "GPU 0"."""
    if "/" not in name:
        return name
    for pattern, words in _WORDS:
        if (found := re.fullmatch(pattern, name)) is not None:
            named = (group or "" for group in found.groups())
            return words.format(*named).replace("_", " ").strip()
    group, _, last = name.rpartition("/")
    return " ".join([*([group] if group in _ROLES else []), _UNITS.sub("", last)]).replace("_", " ")
