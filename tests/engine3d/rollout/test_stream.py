"""Responses one by one, while the weights change: each token has the log-prob and the version of what drew it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine3d.errors import EngineError, UserError
from engine3d.rollout import RolloutEngine, SamplingConfig
from engine3d.rollout.host.messages import Response
from engine3d.rollout.host.stream import UnderWay
from engine3d.rollout.streams import Asked
from tests.engine3d.rollout.test_engine import reference_logprobs

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
LONG = SamplingConfig(max_new_tokens=48, ignore_eos=True)
SHORT = SamplingConfig(max_new_tokens=4, ignore_eos=True)


def _asked(sampling: SamplingConfig, first: int = 0, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Asked]:
    return [Asked(first + index, prompt, sampling) for index, prompt in enumerate(prompts)]


def _all_ended(engine: RolloutEngine, count: int, limit_s: float = 120) -> dict[int, Response]:
    found: dict[int, Response] = {}
    end = time.monotonic() + limit_s
    while len(found) < count and time.monotonic() < end:
        found |= engine.take_ended(1.0)
    assert len(found) == count
    return found


def _wait_for_tokens(engine: RolloutEngine, least: int) -> None:
    end = time.monotonic() + 60
    while True:
        under_way = engine.responses_under_way()
        if len(under_way) == len(PROMPTS) and min(len(each.token_ids) for each in under_way.values()) >= least:
            return
        assert time.monotonic() < end


def _assert_drawn_by_their_versions(
    directories: Sequence[Path], prompt: Sequence[int], response: Response, exact_from: int = 0
) -> None:
    """Each token's log-prob is that of the weights of its version, given all tokens before it."""
    expected = torch.stack(
        [
            reference_logprobs(directory, list(prompt), response.token_ids)
            .gather(1, torch.tensor(response.token_ids).unsqueeze(1))
            .squeeze(1)
            for directory in directories
        ]
    )
    found = torch.tensor(response.logprobs)
    assert len(response.versions) == len(response.logprobs) == len(response.token_ids)
    mine = expected.gather(0, torch.tensor(response.versions).unsqueeze(0)).squeeze(0)
    other = expected.gather(0, (1 - torch.tensor(response.versions)).unsqueeze(0)).squeeze(0)
    assert (found - mine)[exact_from:].abs().max() < 1e-3
    assert (found - other).abs().max() > 0.1  # the other weights give others


def test_responses_end_one_by_one(engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]) -> None:
    engine.submit(_asked(LONG))
    engine.submit(_asked(SHORT, first=10))
    with pytest.raises(EngineError, match="sample 0 is under way already"):
        engine.submit(_asked(LONG)[:1])
    ended: list[int] = []
    found: dict[int, Response] = {}
    while len(found) < 6:
        new = engine.take_ended(60)
        found |= new
        ended += new
    assert set(ended[:3]) == {10, 11, 12}
    for sample, response in found.items():
        assert response.finish_reason == "length"
        assert len(response.token_ids) == (4 if sample >= 10 else 48)
        _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[sample % 10], response)
    assert engine.take_ended(0.0) == {}
    assert engine.responses_under_way() == {}


@pytest.mark.parametrize("policy", ["wait", "continue", "recompute", "resend"])
def test_weights_change_in_the_middle_of_responses(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path], policy: UnderWay
) -> None:
    engine.submit(_asked(LONG))
    _wait_for_tokens(engine, 4)
    engine.load_weights(tiny_model_dirs[1], version=1, under_way=policy)
    engine.submit(_asked(SHORT, first=10))
    found = _all_ended(engine, 6)
    for sample, response in found.items():
        versions = [0] * response.versions.count(0) + [1] * response.versions.count(1)
        assert response.versions == versions
        assert response.finish_reason == "length"
        assert len(response.token_ids) == (4 if sample >= 10 else 48)
        if sample >= 10:
            assert set(versions) == {1}
        elif policy == "wait":
            assert set(versions) == {0}
        else:
            assert versions[0] == 0 and versions[-1] == 1
        if policy == "continue" and sample < 10:  # the KV cache is that of both, and so is what is drawn from it
            kept = versions.count(0)
            _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[sample], _until(response, kept))
        else:
            _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[sample % 10], response)


def _until(response: Response, count: int) -> Response:
    return Response(response.token_ids[:count], response.logprobs[:count], response.versions[:count])


def test_what_was_given_up_ends_with_what_it_has_and_can_go_on(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    engine.submit(_asked(LONG))
    _wait_for_tokens(engine, 4)
    engine.abort([0, 2])
    found = _all_ended(engine, 3)
    assert [found[sample].finish_reason for sample in range(3)] == ["abort", "length", "abort"]
    begun = found[0]
    assert 4 <= len(begun.token_ids) < 48
    engine.submit([Asked(20, PROMPTS[0], LONG, begun=begun)])
    whole = _all_ended(engine, 1)[20]
    assert whole.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 48)
    _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[0], whole)
    engine.abort([20])  # of none under way


def test_a_stream_refuses_what_a_batch_refuses(engine: RolloutEngine) -> None:
    with pytest.raises(UserError, match="prompt 0 is empty"):
        engine.submit([Asked(0, [], LONG)])
    with pytest.raises(UserError, match="seeds need an engine with"):
        engine.submit([Asked(0, [3], LONG, seed=(0, 0))])
    assert engine.take_ended(0.0) == {}
