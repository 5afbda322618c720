"""Responses one by one, while the weights change: each token has the log-prob and the version of what drew it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine3d.errors import EngineError, UserError
from engine3d.rollout import Request, Response, RolloutEngine, SamplingConfig
from engine3d.rollout.host.stream import InFlightPolicy
from engine3d.rollout.requests import GIVEN
from tests.engine3d.rollout.test_engine import reference_logprobs
from tests.support.checkpoint_sender import CheckpointSender
from tests.support.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.processes

PROMPTS = [[3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
LONG = SamplingConfig(max_new_tokens=48, ignore_eos=True)
SHORT = SamplingConfig(max_new_tokens=4, ignore_eos=True)


def _requests(sampling: SamplingConfig, first: int = 0, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return [Request(first + index, prompt, sampling) for index, prompt in enumerate(prompts)]


def _all_ended(engine: RolloutEngine, *samples: int, limit_s: float = 120) -> dict[int, Response]:
    ended: dict[int, Response] = {}
    end = time.monotonic() + limit_s
    while not ended.keys() >= set(samples) and time.monotonic() < end:
        ended |= engine.take_ended(1.0)
    return {sample: ended[sample] for sample in samples}


def _begun(engine: RolloutEngine, first: int, least: int = 4) -> bool:
    """Begin long responses; whether they have a few tokens and go on. All have ended where they were too quick."""
    engine.submit(_requests(LONG, first))
    while in_flight := engine.responses_in_flight():
        if len(in_flight) == len(PROMPTS) and min(len(response.token_ids) for response in in_flight.values()) >= least:
            return True
    _all_ended(engine, *range(first, first + len(PROMPTS)))
    return False


ATTEMPTS = range(100, 4100, 100)
"""Ids of samples: what is to happen in the middle of responses may come too late, and is tried again."""


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
    logprobs = torch.tensor(response.logprobs)
    assert len(response.versions) == len(response.logprobs) == len(response.token_ids)
    mine = expected.gather(0, torch.tensor(response.versions).unsqueeze(0)).squeeze(0)
    other = expected.gather(0, (1 - torch.tensor(response.versions)).unsqueeze(0)).squeeze(0)
    assert (logprobs - mine)[exact_from:].abs().max() < 1e-3
    assert (logprobs - other).abs().max() > 0.1  # the other weights give others


def test_responses_end_one_by_one(engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]) -> None:
    engine.submit(_requests(LONG, first=0))
    with pytest.raises(UserError, match="sample 0 is in flight already"):
        engine.submit([*_requests(LONG, first=0)[:1], *_requests(LONG, first=0)[:1]])
    engine.submit(_requests(SHORT, first=10))
    for sample, response in _all_ended(engine, 0, 1, 2, 10, 11, 12).items():
        assert response.finish_reason == "length"
        assert len(response.token_ids) == (4 if sample >= 10 else 48)
        _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[sample % 10], response)
    assert engine.take_ended(0.0) == {}
    assert engine.responses_in_flight() == {}


@pytest.mark.parametrize("policy", ["wait", "continue", "recompute", "resend"])
def test_weights_change_in_the_middle_of_responses(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path], policy: InFlightPolicy
) -> None:
    for first in ATTEMPTS:
        checkpoints.transfer(tiny_model_dirs[0], version=0)
        if not _begun(engine, first):
            continue
        before = engine.stats
        checkpoints.transfer(tiny_model_dirs[1], 1, policy)
        engine.submit(_requests(SHORT, first + 10))
        ended = _all_ended(engine, *range(first, first + 3), *range(first + 10, first + 13))
        old = {sample: response for sample, response in ended.items() if sample < first + 10}
        for sample, response in ended.items():
            versions = [0] * response.versions.count(0) + [1] * response.versions.count(1)
            assert response.versions == versions
            assert response.finish_reason == "length"
            assert len(response.token_ids) == (48 if sample in old else 4)
            assert set(versions) == {1} or sample in old
            if policy == "continue" and sample in old:  # the KV cache is that of both, and so is what is drawn from it
                response = _until(response, versions.count(0))
            _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[sample % 10], response)
        if policy == "wait":
            assert all(set(response.versions) == {0} for response in old.values())
            return
        if all(set(response.versions) == {0, 1} for response in old.values()):
            resent, continued = engine.stats.resent - before.resent, engine.stats.continued - before.continued
            assert (resent, continued) == ((3, 0) if policy == "resend" else (0, 3))
            return
    pytest.fail("weights never changed in the middle of all responses")


def _until(response: Response, count: int) -> Response:
    return Response(response.token_ids[:count], response.logprobs[:count], response.versions[:count])


def test_what_was_given_up_ends_with_what_it_has_and_can_go_on(
    engine: RolloutEngine, tiny_model_dirs: tuple[Path, Path]
) -> None:
    for first in ATTEMPTS:
        if not _begun(engine, first):
            continue
        engine.abort([first, first + 2])
        ended = _all_ended(engine, first, first + 1, first + 2)
        if [response.finish_reason for response in ended.values()] == ["abort", "length", "abort"]:
            break
    else:
        pytest.fail("responses were never given up before their end")
    begun = ended[first]
    assert 4 <= len(begun.token_ids) < 48
    engine.submit([Request(20, PROMPTS[0], LONG, prefix=begun)])
    complete = _all_ended(engine, 20)[20]
    assert complete.token_ids[: len(begun.token_ids)] == begun.token_ids
    assert (complete.finish_reason, len(complete.token_ids)) == ("length", 48)
    _assert_drawn_by_their_versions(tiny_model_dirs, PROMPTS[0], complete)
    engine.abort([20])  # of none under way


def test_turns_continue_behind_tokens_that_were_not_drawn(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path]
) -> None:
    """Over a change of weights between two turns, with all tokens before a turn as they are."""
    given, samples = [13, 14, 3], range(50, 53)
    episodes = dict.fromkeys(samples, Response([], [], []))
    for turn in range(4):
        checkpoints.transfer(tiny_model_dirs[turn % 2], version=turn % 2)
        limit = {sample: len(episodes[sample].token_ids) + 2 + sample - 50 for sample in samples}
        engine.submit(
            [
                Request(
                    sample,
                    prompt,
                    SamplingConfig(max_new_tokens=limit[sample], ignore_eos=True),
                    prefix=episodes[sample] if turn else None,
                )
                for sample, prompt in zip(samples, PROMPTS, strict=True)
            ]
        )
        for sample, response in _all_ended(engine, *samples).items():
            assert len(response.token_ids) == limit[sample] and response.finish_reason == "length"
            assert response.token_ids[: len(episodes[sample].token_ids)] == episodes[sample].token_ids
            episodes[sample] = response.extended(given)
    for prompt, episode in zip(PROMPTS, episodes.values(), strict=True):
        assert episode.versions.count(GIVEN) == 4 * len(given) and episode.oldest_version == 0
        drawn = torch.tensor([version != GIVEN for version in episode.versions])
        expected = torch.stack(
            [
                reference_logprobs(directory, list(prompt), episode.token_ids)
                .gather(1, torch.tensor(episode.token_ids).unsqueeze(1))
                .squeeze(1)
                for directory in tiny_model_dirs
            ]
        )
        mine = expected.gather(0, torch.tensor(episode.versions).clamp(min=0).unsqueeze(0)).squeeze(0)
        assert (torch.tensor(episode.logprobs) - mine)[drawn].abs().max() < 1e-3


def test_a_turn_finds_the_tokens_before_it_in_the_cache_of_its_engine(engine: RolloutEngine) -> None:
    prompt = [9, 4, 10, 5, 11, 3]
    engine.submit([Request(50, prompt, SHORT)])
    turn = _all_ended(engine, 50)[50]
    before, prefix = engine.stats, turn.extended([3, 4])
    again = SamplingConfig(max_new_tokens=len(prefix.token_ids) + 4, ignore_eos=True)
    engine.submit([Request(51, prompt, again, prefix=prefix, turn_start=len(prefix.token_ids))])
    _all_ended(engine, 51)
    after = engine.stats
    assert after.prompt_tokens - before.prompt_tokens == len(prompt) + len(prefix.token_ids)
    # All that was computed: the last token of a turn was drawn, and was no input of a forward pass.
    assert after.cached_tokens - before.cached_tokens >= len(prompt) + len(turn.token_ids) - 1


def test_no_response_goes_on_behind_its_end(
    engine: RolloutEngine, checkpoints: CheckpointSender, tiny_model_dirs: tuple[Path, Path]
) -> None:
    """Though it is aborted with its last token, to be sent again."""
    ends = set(range(1, VOCAB_SIZE // 12))  # of which the first is the model's own
    sampling = SamplingConfig(max_new_tokens=48, stop_token_ids=sorted(ends))
    resent = engine.stats.resent
    for round_ in range(4):
        first = 1000 + 100 * round_
        samples = range(first, first + 48)
        engine.submit(_requests(sampling, first, [[3, 4, 5]] * len(samples)))
        ended = dict[int, Response]()
        for version in (1, 0):
            ended |= engine.take_ended(0.2)
            checkpoints.transfer(tiny_model_dirs[version], version, "resend")
        ended |= _all_ended(engine, *(set(samples) - ended.keys()))
        for response in ended.values():
            assert ends.isdisjoint(response.token_ids[:-1])
            assert (response.finish_reason == "stop") == (response.token_ids[-1] in ends)
    assert engine.stats.resent > resent


def test_a_stream_refuses_what_a_batch_refuses(engine: RolloutEngine) -> None:
    for together in (False, True):
        with pytest.raises(UserError, match="prompt 0 is empty"):
            engine.submit([Request(0, [], LONG)], together=together)
        with pytest.raises(UserError, match="sample 7 is in flight already"):
            engine.submit([Request(7, [3], LONG), Request(7, [4], LONG)], together=together)
    with pytest.raises(UserError, match="sample 0 has a prefix, expected none in requests submitted together"):
        engine.submit([Request(0, [3], LONG, prefix=Response([5], [-1.0], [0]))], together=True)
    assert engine.take_ended(0.0) == {}


def test_a_batch_ends_together_and_beside_responses_that_end_one_by_one(engine: RolloutEngine) -> None:
    batch = [Request(200 + index, [3, 4], SHORT if index else LONG, index // 2, index % 2) for index in range(6)]
    engine.submit(batch, together=True)
    engine.submit(_requests(SHORT, first=0))
    alone: dict[int, Response] = {}
    end = time.monotonic() + 120
    while len(alone) < 3 and time.monotonic() < end:
        alone |= engine.take_ended(1.0, range(3))
    assert alone.keys() == {0, 1, 2}
    ended: dict[int, Response] = {}
    while not ended and time.monotonic() < end:
        ended = engine.take_ended(1.0)
    assert ended.keys() == {request.sample for request in batch}  # all by one message
    assert [len(ended[request.sample].token_ids) for request in batch] == [48, 4, 4, 4, 4, 4]
    assert {response.finish_reason for response in ended.values()} == {"length"}
    assert all(response.versions == [0] * len(response.token_ids) for response in ended.values())


def test_an_aborted_batch_ends_with_what_it_has(engine: RolloutEngine) -> None:
    batch = [Request(300 + index, [3, 4], LONG) for index in range(100)]
    samples = [request.sample for request in batch]
    engine.submit(batch, together=True)
    time.sleep(0.2)
    engine.abort(samples[:50])
    responses = engine.wait_for(samples)
    assert {response.finish_reason for response in responses[50:]} == {"length"}
    assert {response.finish_reason for response in responses[:50]} <= {"abort", "length"}
    for response in responses:
        assert len(response.token_ids) == len(response.logprobs) == len(response.versions)


@pytest.mark.parametrize("together", [False, True])
def test_a_response_that_cannot_be_made_fails_alone(engine: RolloutEngine, together: bool) -> None:
    """Requests past the client's own checks: SGLang refuses a prompt that is longer than its context."""
    assert engine._host is not None
    long = [Request(400 + index, [5] * 10_000, SHORT) for index in range(2)]
    engine._host.responses.submitted([request.sample for request in long])
    engine._host.call("test", "submit", 60, requests=long, together=together)
    engine.submit(_requests(SHORT, first=0))
    ended = _all_ended(engine, 0, 1, 2, 400, 401)
    assert [ended[sample].finish_reason for sample in range(3)] == ["length"] * 3
    for request in long:
        response = ended[request.sample]
        assert response.finish_reason == "abort" and not response.token_ids
        assert response.error is not None and response.error.startswith("ValueError: ")
    engine._host.responses.submitted([400])
    engine._host.call("test", "submit", 60, requests=long[:1], together=together)
    with pytest.raises(EngineError, match=r"sample 400: ValueError: .*; log: "):
        engine.wait_for([400])
    assert {response.error for response in _all_of(engine)} == {None}


def _all_of(engine: RolloutEngine) -> list[Response]:
    engine.submit(_requests(SHORT, first=10), together=True)
    return engine.wait_for([10, 11, 12])


@pytest.mark.parametrize("together", [False, True])
def test_a_request_that_a_transfer_holds_back_is_aborted_at_once(engine: RolloutEngine, together: bool) -> None:
    assert engine._host is not None
    engine._host.call("test", "begin_weights", 60, responses=0, in_flight="wait")
    try:
        engine.submit(_requests(LONG, first=500), together=together)
        time.sleep(0.2)
        assert engine.take_ended(0.0) == {}
        engine.abort([500, 501, 502])
        ended = _all_ended(engine, 500, 501, 502)
        assert {(response.finish_reason, len(response.token_ids)) for response in ended.values()} == {("abort", 0)}
    finally:
        engine._host.call("test", "commit_weights", 60, version=0)
    assert {len(response.token_ids) for response in _all_of(engine)} == {4}


@pytest.mark.parametrize(
    "policy",
    ["recompute", "resend", *(pytest.param(policy, marks=pytest.mark.release) for policy in ("wait", "continue"))],
)
def test_a_begin_that_fails_half_way_is_undone(engine: RolloutEngine, policy: InFlightPolicy) -> None:
    """Its call of the ranks finds a folder where it writes a file."""
    assert engine._host is not None
    engine.submit(_requests(LONG, first=600))
    blocked = engine._host._run_directory / f"call-{next(engine._host._ids) + 1}"
    blocked.mkdir()
    with pytest.raises(EngineError, match=r"begin of weights version 9 failed: IsADirectoryError"):
        engine.begin_weights(9, in_flight=policy)
    blocked.rmdir()
    ended = _all_ended(engine, 600, 601, 602)
    assert {(response.finish_reason, len(response.token_ids)) for response in ended.values()} == {("length", 48)}
    assert all(set(response.versions) == {0} for response in [*ended.values(), *_all_of(engine)])
    engine._host.call("test", "begin_weights", 60, responses=0, in_flight=policy)  # and may be begun again
    engine._host.call("test", "commit_weights", 60, version=0)
