"""An engine with a KV cache in fp8, against transformers with keys and values in that format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine3d.rollout import RolloutEngine, SamplingConfig
from tests.support.engine_responses import responses_of
from tests.support.tiny_families import make
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _cached_in(dtype: torch.dtype) -> Any:
    """Attention of keys and values in a format, and of queries in their own."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **more: Any
    ) -> Any:
        key, value = (tensor.to(dtype).to(tensor.dtype) for tensor in (key, value))
        return sdpa_attention_forward(module, query, key, value, *others, **more)

    return attend


for _name, _dtype in FORMATS.items():
    AttentionInterface.register(_name, _cached_in(_dtype))


@pytest.mark.parametrize("kind", ["fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.long)])
def test_log_probs_are_those_of_keys_and_values_in_fp8(kind: str, tmp_path: Path) -> None:
    model = make("qwen2-tied", tmp_path / "model")
    config = TINY_ROLLOUT.model_copy(update={"kv_cache_dtype": kind})
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (5, 9, 20)]
    with warm_starts(), RolloutEngine(tmp_path / "model", config) as engine:
        responses = responses_of(engine, prompts, SamplingConfig(max_new_tokens=12, ignore_eos=True))
        largest = {"plain": 0.0, kind: 0.0}
        for prompt, (response,) in zip(prompts, responses, strict=True):
            tokens = [*prompt, *response.token_ids]
            (read,) = engine.logprobs([tokens], [len(prompt)])
            for implementation, name in (("sdpa", "plain"), (kind, kind)):
                model.set_attn_implementation(implementation)
                with torch.no_grad():
                    every = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
                expected = every.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
                for given in (response.logprobs, read.logprobs):  # of decoding, and of a prompt
                    largest[name] = max(largest[name], float((torch.tensor(given) - expected).abs().max()))
    assert largest[kind] < 1e-4 < 0.01 < largest["plain"], largest
