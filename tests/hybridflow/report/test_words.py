"""Metrics in words."""

from __future__ import annotations

import pytest

from hybridflow.report.catalogue import in_words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reward/mean", "mean of all samples"),
        ("reward/exact_match/mean", "exact match"),
        ("train/gradient_norm", "gradient norm"),
        ("cost_critic/gradient_norm", "cost critic gradient norm"),
        ("critic/explained_variance", "critic explained variance"),
        ("rollout/throughput_tokens_per_sec", "throughput"),
        ("stream/busy_share", "busy"),
        ("memory/actor_gpu_mem_mb", "actor"),
        ("GPU 0", "GPU 0"),
        ("mean@4", "mean@4"),
    ],
)
def test_metrics_in_words(name: str, words: str) -> None:
    assert in_words(name) == words
