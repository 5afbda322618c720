"""Routes that come with responses are those of transformers on the weights that drew each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine3d.rollout import Request, Response, RolloutEngine
from engine3d.rollout.host.stream import InFlightPolicy
from tests.engine3d.rollout.test_stream import ATTEMPTS, LONG, PROMPTS, SHORT, _all_ended, _begun
from tests.support.checkpoint_sender import CheckpointSender
from tests.support.engine_responses import responses_of
from tests.support.reference_routes import by_layer, reference_routes

pytestmark = pytest.mark.processes

LAYERS = 2
MISSING = 255


def _expected(directories: Sequence[Path], prompt: Sequence[int], response: Response) -> torch.Tensor:
    """Routes of the weights of each token's version, given all tokens before it; a prompt's are of the first."""
    tokens = [*prompt, *response.token_ids]
    routes = torch.stack([reference_routes(directory, tokens)[:-1] for directory in directories])
    versions = torch.tensor([response.versions[0]] * (len(prompt) - 1) + response.versions)
    return routes[versions, torch.arange(len(versions))]


def _assert_routes(directories: Sequence[Path], prompt: Sequence[int], response: Response) -> None:
    assert response.routes is not None and response.routes.dtype == "uint8"
    assert len(response.routes) == len(prompt) + len(response.token_ids) - 1
    assert torch.equal(by_layer(response.routes, LAYERS), _expected(directories, prompt, response))


def test_routes_of_a_batch_and_of_prompts_in_the_cache(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    long = [3 + number % 90 for number in range(40)]
    first = responses_of(engine, [*PROMPTS, long], SHORT, samples_per_prompt=3)
    for prompt, group in zip([*PROMPTS, long], first, strict=True):
        for response in group:
            _assert_routes(tiny_model_dirs, prompt, response)
    # A second turn, one by one and together: all but its last tokens are in the cache.
    turn = [*long, *first[3][0].token_ids, 7, 8]
    engine.submit([Request(1, long, SHORT), Request(2, turn, SHORT)])
    ended = _all_ended(engine, 1, 2)
    again = engine.stats.cached_tokens
    engine.submit([Request(3, long, SHORT), Request(4, turn, SHORT)])
    ended |= _all_ended(engine, 3, 4)
    assert engine.stats.cached_tokens - again >= len(long) + len(turn) - 2
    for sample, response in ended.items():
        _assert_routes(tiny_model_dirs, long if sample % 2 else turn, response)
    for [response] in responses_of(engine, [turn], SHORT):
        _assert_routes(tiny_model_dirs, turn, response)


@pytest.mark.parametrize("policy", ["continue", "recompute", "resend"])
def test_routes_are_of_the_pass_that_drew_the_next_token(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path], policy: InFlightPolicy
) -> None:
    for first in ATTEMPTS:
        checkpoints.transfer(tiny_model_dirs[0], version=0)
        if not _begun(engine, first):
            continue
        begun = engine.responses_in_flight()
        checkpoints.transfer(tiny_model_dirs[1], 1, policy)
        ended = _all_ended(engine, *range(first, first + 3))
        for sample, response in begun.items():  # a state for a checkpoint has routes, too
            _assert_routes(tiny_model_dirs, PROMPTS[sample % 10], response)
        if not all(set(response.versions) == {0, 1} for response in ended.values()):
            continue
        for sample, response in ended.items():
            prompt, routes = PROMPTS[sample % 10], response.routes
            assert routes is not None
            if policy == "continue":  # what is drawn from a KV cache of both is checked as far as it is of one
                old = len(prompt) - 1 + response.versions.count(0)
                expected = _expected(tiny_model_dirs, prompt, response)[:old]
                assert torch.equal(by_layer(routes, LAYERS)[:old], expected)
                assert len(routes) == len(prompt) + 47 and (routes < 4).all()
            else:
                _assert_routes(tiny_model_dirs, prompt, response)
        return
    pytest.fail("weights never changed in the middle of all responses")


def test_a_resumed_response_has_the_routes_of_its_prefix(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path]
) -> None:
    for first in ATTEMPTS:
        if not _begun(engine, first):
            continue
        engine.abort(range(first, first + 3))
        ended = _all_ended(engine, *range(first, first + 3))
        if {response.finish_reason for response in ended.values()} == {"abort"}:
            break
    else:
        pytest.fail("responses were never aborted before their end")
    checkpoints.transfer(tiny_model_dirs[1], version=1)
    begun, unknown = ended[first], ended[first + 1]
    unknown = Response(unknown.token_ids, unknown.logprobs, unknown.versions)
    engine.submit([Request(1, PROMPTS[0], LONG, prefix=begun), Request(2, PROMPTS[1], LONG, prefix=unknown)])
    resumed = _all_ended(engine, 1, 2)
    _assert_routes(tiny_model_dirs, PROMPTS[0], begun)
    _assert_routes(tiny_model_dirs, PROMPTS[0], resumed[1])
    assert {0, 1} == set(resumed[1].versions)
    routes, missing = resumed[2].routes, len(PROMPTS[1]) + len(unknown.token_ids) - 1
    assert routes is not None and (routes[:missing] == MISSING).all()
    expected = _expected(tiny_model_dirs, PROMPTS[1], resumed[2])
    assert torch.equal(by_layer(routes[missing:], LAYERS), expected[missing:])
