"""Rewards of episodes, which end at the same time: each thread gets what is of its text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridflow.rewards.builtin import BUILTIN_REWARDS, PROVIDED_REWARDS
from hybridflow.rewards.processes.function_process import ScoringFunction, load_callable

pytestmark = pytest.mark.processes


def _function(name: str, **arguments: Any) -> ScoringFunction:
    path = PROVIDED_REWARDS.get(name) or f"hybridflow.rewards.builtin:{name}"
    assert name in PROVIDED_REWARDS or name in BUILTIN_REWARDS
    return ScoringFunction(load_callable(path, ""), arguments, None)


@pytest.mark.parametrize(
    ("name", "right", "wrong", "answer"),
    [
        ("math", r"\boxed{\frac{1}{2}}", r"\boxed{3}", "0.5"),
        ("code", "```python\ndef f(): return 1\n```", "```python\ndef f(): return 2\n```", ["assert f() == 1"]),
    ],
)
def test_threads_that_score_at_the_same_time_get_the_rewards_of_their_texts(
    name: str, right: str, wrong: str, answer: Any
) -> None:
    function = _function(name, **({"sandbox": {"isolation": "none"}} if name == "code" else {}))
    texts = [right, wrong, wrong, right] * 4

    def score(text: str) -> float | str:
        return function.score([text], {"answers": [answer]}, 60.0)[0]

    with ThreadPoolExecutor(len(texts)) as threads:
        assert list(threads.map(score, texts)) == [float(text == right) for text in texts]
