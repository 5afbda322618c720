"""Speculative decoding with a model's layer for multi-token prediction: the policy's tokens and log-probs, sooner."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine3d.errors import UserError
from engine3d.memory.serving import serving_by_rank
from engine3d.models import load_model_spec
from engine3d.reshard.describe.shards import Location
from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from engine3d.rollout.cache import tokens_beyond
from engine3d.rollout.config import MOST_DRAFT_TOKENS
from engine3d.rollout.host.stream import InFlightPolicy
from tests.support import tiny_families
from tests.support.checkpoint_sender import CheckpointSender, transfer
from tests.support.engine_responses import responses_of
from tests.support.tiny_rollout import TINY_ROLLOUT
from tests.support.warm import warm_starts

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12], [3, 4, 5] * 6]
GREEDY = SamplingConfig(temperature=0, max_new_tokens=10, ignore_eos=True)
SAMPLED = SamplingConfig(temperature=1.3, max_new_tokens=10, ignore_eos=True)
LONG = SamplingConfig(max_new_tokens=48, ignore_eos=True)
DRAFTS = 2


@pytest.mark.parametrize(
    ("name", "settings"), [("glm4_moe", {"draft_tokens": 1}), ("deepseek_v3", {"draft_tokens": 3, "tp": 2})]
)
def test_tokens_and_log_probs_are_those_of_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    started, sent = tmp_path / "started", tmp_path / "sent"
    for directory, seed in ((started, 1), (sent, 0)):
        tiny_families.make(name, directory, seed=seed)
        tiny_families.add_drafting_layer(directory)
    model = _model(sent)
    config = TINY_ROLLOUT.model_copy(update=settings)
    with warm_starts(), RolloutEngine(started, config) as engine:
        weights = engine.weight_bytes()
        transfer(engine, sent, version=1, drafts=True)
        assert engine.verify_weights(sent) == [[]] * config.tp
        assert [bool(differing) for differing in engine.verify_weights(started)] == [True] * config.tp
        assert engine.weight_bytes() == weights
        for sampling in (GREEDY, SAMPLED):
            first = [response for (response,) in responses_of(engine, PROMPTS, sampling)]
            # A second turn, of which all but the last tokens are in the cache.
            longer = [[*prompt, *response.token_ids, 7, 8] for prompt, response in zip(PROMPTS, first, strict=True)]
            second = [response for (response,) in responses_of(engine, longer, sampling)]
            for prompts, responses in ((PROMPTS, first), (longer, second)):
                for prompt, response in zip(prompts, responses, strict=True):
                    _assert_drawn_from(model, prompt, response, sampling)
                    assert set(response.versions) == {1}
        # Of a random layer's drafts hardly any are accepted.
        for prompt, responses in zip(PROMPTS, responses_of(engine, PROMPTS, SAMPLED, 25), strict=True):
            for response in responses:
                _assert_drawn_from(model, prompt, response, SAMPLED)
        (read,) = engine.logprobs([[*PROMPTS[0], 7, 9]], [3])
        expected = _logprobs(model, PROMPTS[0], [7, 9], 1.0).gather(1, torch.tensor([[7], [9]]))[:, 0]
        torch.testing.assert_close(torch.tensor(read.logprobs), expected, atol=1e-4, rtol=0)
        assert 0 < engine.stats.accepted < settings["draft_tokens"] * engine.stats.verified
        spec = load_model_spec(sent)
        if spec.sizes.latent is None:  # of a latent the estimate has copies for attention, too
            (predicted,) = serving_by_rank(spec, config, [Location("node", "cpu:0")])
            assert predicted.weights == engine.weight_bytes()


# A model that its layer for multi-token prediction knows ----------------------------------------------------------


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose next token follows from the last one alone."""
    made = tuple(tmp_path_factory.mktemp("models") / str(seed) for seed in range(2))
    for seed, directory in enumerate(made):
        tiny_families.make("glm4_moe", directory, seed=seed)
        tiny_families.add_drafting_layer(directory, follows_token=True)
    return made[0], made[1]


@pytest.fixture(scope="module")
def engine(directories: tuple[Path, Path]) -> Iterator[RolloutEngine]:
    with (
        warm_starts(),
        RolloutEngine(directories[0], TINY_ROLLOUT.model_copy(update={"draft_tokens": DRAFTS})) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def checkpoints(engine: RolloutEngine, directories: tuple[Path, Path]) -> CheckpointSender:
    return CheckpointSender(engine, directories[0])


def test_drafts_are_of_the_trunk_that_was_sent(
    engine: RolloutEngine, checkpoints: CheckpointSender, directories: tuple[Path, Path]
) -> None:
    for version, directory in ((1, directories[1]), (2, directories[0])):
        checkpoints.transfer(directory, version)
        before = engine.stats
        responses = responses_of(engine, PROMPTS, GREEDY)
        for prompt, (response,) in zip(PROMPTS, responses, strict=True):
            _assert_drawn_from(_model(directory), prompt, response, GREEDY)
        verified = engine.stats.verified - before.verified
        assert engine.stats.accepted - before.accepted == DRAFTS * verified  # with other weights hardly any would be
        assert verified >= 2 * len(PROMPTS)  # the last pass may be counted later


def test_a_response_ends_at_its_first_end_among_the_tokens_of_a_pass(
    engine: RolloutEngine, checkpoints: CheckpointSender, directories: tuple[Path, Path]
) -> None:
    checkpoints.transfer(directories[0], 3)
    for most in range(1, 9):
        ((response,),) = responses_of(engine, [[5]], GREEDY.model_copy(update={"max_new_tokens": most}))
        assert (len(response.token_ids), response.finish_reason) == (most, "length")
    tokens = responses_of(engine, [[5]], GREEDY)[0][0].token_ids
    for index, token in enumerate(tokens):
        for most in (index + 1, 10):  # a pass has later tokens, and they may be beyond the limit
            stops = GREEDY.model_copy(update={"stop_token_ids": (token,), "ignore_eos": False, "max_new_tokens": most})
            ((response,),) = responses_of(engine, [[5]], stops)
            assert response.token_ids == tokens[: tokens.index(token) + 1]
            assert response.finish_reason == "stop"
            assert len(response.logprobs) == len(response.versions) == len(response.token_ids)


def test_the_distribution_is_the_policys(
    engine: RolloutEngine, checkpoints: CheckpointSender, directories: tuple[Path, Path]
) -> None:
    checkpoints.transfer(directories[0], 4)
    sampling = SamplingConfig(temperature=0.5, max_new_tokens=2 + DRAFTS, ignore_eos=True)
    before = engine.stats
    responses = [response for group in responses_of(engine, [[5]] * 12, sampling, 100) for response in group]
    verified, accepted = engine.stats.verified - before.verified, engine.stats.accepted - before.accepted
    assert 0.2 < accepted / verified < 0.8  # some are accepted, and some are not
    model = _model(directories[0])
    every = model(torch.arange(97)[:, None]).logits[:, 0].div(sampling.temperature).softmax(-1).detach()
    for index in range(2 + DRAFTS):  # the first is of the prompt's pass
        drawn = Counter(([5, *response.token_ids][index], response.token_ids[index]) for response in responses)
        before_it = Counter([5, *response.token_ids][index] for response in responses)
        expected = {
            (token, after): count * float(every[token, after])
            for token, count in before_it.items()
            for after in range(97)
        }
        often = {pair: count for pair, count in expected.items() if count >= 5}
        square = sum((drawn[pair] - count) ** 2 / count for pair, count in often.items())
        assert len(often) > 10
        assert square < len(often) + 4 * (2 * len(often)) ** 0.5, (index, square, len(often))


@pytest.mark.parametrize("policy", ["wait", "continue", "recompute", "resend"])
def test_each_token_has_the_version_that_drew_it(
    engine: RolloutEngine, checkpoints: CheckpointSender, directories: tuple[Path, Path], policy: InFlightPolicy
) -> None:
    models = [_model(directory) for directory in directories]
    for first in range(100, 4100, 100):
        checkpoints.transfer(directories[0], 0)
        engine.submit([Request(first + index, prompt, LONG) for index, prompt in enumerate(PROMPTS[:3])])
        while len(begun := engine.responses_in_flight()) < 3 or min(len(r.token_ids) for r in begun.values()) < 4:
            if not begun and engine.stats.used_tokens == 0:
                break
        checkpoints.transfer(directories[1], 1, policy)
        ended = _all_ended(engine, range(first, first + 3))
        for index, response in enumerate(ended):
            assert (response.finish_reason, len(response.token_ids)) == ("length", 48)
            assert response.versions == sorted(response.versions) and len(response.versions) == 48
            expected = torch.stack([_logprobs(model, PROMPTS[index], response.token_ids, 1.0) for model in models])
            drawn = expected[torch.tensor(response.versions), torch.arange(48), torch.tensor(response.token_ids)]
            torch.testing.assert_close(torch.tensor(response.logprobs), drawn, atol=1e-3, rtol=0)
        if policy == "wait" or all(set(response.versions) == {0, 1} for response in ended):
            assert policy != "wait" or all(set(response.versions) == {0} for response in ended)
            return
    pytest.fail("weights never changed in the middle of all responses")


def test_a_response_fills_the_context_and_the_cache_with_the_most_drafts(directories: tuple[Path, Path]) -> None:
    context = 64
    settings = {"draft_tokens": MOST_DRAFT_TOKENS, "max_total_tokens": context + tokens_beyond(MOST_DRAFT_TOKENS)}
    full = TINY_ROLLOUT.model_copy(update={"context_length": context, **settings})
    with warm_starts(), RolloutEngine(directories[0], full) as engine:
        for prompt in ([5] * 4, [5] * 60):
            sampling = GREEDY.model_copy(update={"max_new_tokens": context - len(prompt)})
            for (response,) in responses_of(engine, [prompt, prompt], sampling):
                assert (len(response.token_ids), response.finish_reason) == (context - len(prompt), "length")
        with pytest.raises(UserError, match="64"):
            responses_of(engine, [[5] * 60], GREEDY.model_copy(update={"max_new_tokens": 5}))


def test_other_distributions_are_refused(engine: RolloutEngine) -> None:
    with pytest.raises(UserError, match=r"^top_p=0.5 was not tried with draft_tokens=2$"):
        responses_of(engine, [[5]], SamplingConfig(max_new_tokens=4, top_p=0.5))


def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")


def _logprobs(model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.as_tensor(logits / temperature).log_softmax(-1)


def _assert_drawn_from(model: Any, prompt: Sequence[int], response: Response, sampling: SamplingConfig) -> None:
    assert len(response.token_ids) == sampling.max_new_tokens
    logprobs = _logprobs(model, prompt, response.token_ids, sampling.temperature or 1.0)
    if sampling.temperature == 0:
        assert response.token_ids == logprobs.argmax(-1).tolist()
    expected = logprobs.gather(1, torch.tensor(response.token_ids).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-4, rtol=0)


def _all_ended(engine: RolloutEngine, samples: Sequence[int], limit_s: float = 120) -> list[Response]:
    ended: dict[int, Response] = {}
    end = time.monotonic() + limit_s
    while not ended.keys() >= set(samples) and time.monotonic() < end:
        ended |= engine.take_ended(1.0)
    return [ended[sample] for sample in samples]
