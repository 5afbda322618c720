"""SGLang serves DeepSeek-V3 on this machine: the tokens and log-probs of transformers, on one rank and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine3d.rollout import Response, RolloutEngine, SamplingConfig
from tests.support import tiny_families
from tests.support.checkpoint_sender import transfer
from tests.support.engine_responses import responses_of
from tests.support.reference_routes import by_layer, reference_routes
from tests.support.tiny_rollout import WITH_ROUTES
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [3, 4, 5] * 6]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=10, ignore_eos=True)


# Accepted arguments of SGLang's that a CPU has a use for.
ACCEPTED = {
    "load_format": "safetensors",
    "chunked_prefill_size": 8,
    "max_prefill_tokens": 4096,
    "disable_shared_experts_fusion": True,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 0.3,
    "watchdog_timeout": 200,
    "decode_log_interval": 5,
    "log_level": "debug",
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("deepseek_v3", {"tp": 2, "ep": 2}), ("deepseek_v3-queries", {"tp": 1, "server_args": ACCEPTED})],
)
def test_generations_are_those_of_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The first as transformers saves it, without keys that SGLang needs.

    The second with further arguments, and under Kimi-K2's model_type, of which transformers has no class.
    """
    started, sent = tmp_path / "started", tmp_path / "sent"
    tiny_families.make(name, started, seed=1)
    model = tiny_families.make(name, sent)
    if name == "deepseek_v3-queries":
        for directory in (started, sent):
            config = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
            (directory / "config.json").write_text(json.dumps(config))
    with warm_starts(), RolloutEngine(started, WITH_ROUTES.model_copy(update=settings)) as engine:
        transfer(engine, sent, version=1)
        first = [generation for (generation,) in responses_of(engine, PROMPTS, GREEDY)]
        # A second turn, of which all but the last tokens are in the cache.
        longer = [[*prompt, *generation.token_ids, 7, 8] for prompt, generation in zip(PROMPTS, first, strict=True)]
        second = [generation for (generation,) in responses_of(engine, longer, GREEDY)]
    for prompts, generations in ((PROMPTS, first), (longer, second)):
        for prompt, generation in zip(prompts, generations, strict=True):
            assert_same(model, prompt, generation)


def assert_same(model: torch.nn.Module, prompt: list[int], generation: Response) -> None:
    response = torch.tensor(generation.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *generation.token_ids]])).logits[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    assert response.tolist() == logprobs.argmax(-1).tolist()
    expected = logprobs.gather(1, response.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
    routes = reference_routes(model, [*prompt, *generation.token_ids])[:-1]  # of the second layer, the first is dense
    assert torch.equal(by_layer(generation.routes, routes.shape[1]), routes)
