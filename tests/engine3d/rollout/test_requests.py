"""Requests on their way to SGLang, and responses at an engine's client, without an engine."""

from __future__ import annotations

import base64
import threading
from pathlib import Path

import numpy as np
import pytest

from engine3d.errors import EngineError, UserError
from engine3d.models.experts.routes import RouteFormat
from engine3d.rollout import Request, Response, SamplingConfig
from engine3d.rollout.host.generation import drawn, sampling_parameters, submission_order
from engine3d.rollout.host.process import PendingResponses
from engine3d.rollout.scheduler.routes import ROUTES
from engine3d.rollout.scheduler.versions import VERSIONS

LOG = Path("log")
ONE = Response([3], [-0.5], [0], "stop")


def test_first_samples_of_prompts_that_run_together_are_sent_first() -> None:
    assert submission_order([3, 3], running=8) == [0, 3, 1, 2, 4, 5]
    assert submission_order([2, 2, 2], running=4) == [0, 2, 1, 3, 4, 5]  # four run at once: two prompts
    assert submission_order([4, 4], running=2) == [0, 1, 2, 3, 4, 5, 6, 7]  # not even one prompt's
    assert submission_order([1, 3, 2], running=6) == [0, 1, 2, 3, 4, 5]
    assert submission_order([1, 3, 2], running=9) == [0, 1, 4, 2, 3, 5]


def test_seeds_are_of_the_engine_the_group_and_the_index() -> None:
    def seed(group: int, index: int, engine_seed: int = 0) -> int:
        request = Request(99, [3], SamplingConfig(), group, index)
        seed_of_request: int = sampling_parameters(request, engine_seed)["sampling_seed"]
        return seed_of_request

    assert seed(1, 2) == seed(1, 2)
    assert len({seed(1, 2), seed(2, 1), seed(1, 1), seed(1, 2, engine_seed=1)}) == 4
    assert "sampling_seed" not in sampling_parameters(Request(99, [3], SamplingConfig()), None)


def test_tokens_have_their_own_versions_or_the_one_that_is_served() -> None:
    meta = {"finish_reason": {"type": "length"}, "weight_version": "7", VERSIONS: [5, 7]}
    meta["output_token_logprobs"] = [(-0.5, 3, None), (-1.5, 4, None)]
    assert drawn(meta, token_versions=True) == Response([3, 4], [-0.5, -1.5], [5, 7], "length")
    assert drawn(meta, token_versions=False) == Response([3, 4], [-0.5, -1.5], [7, 7], "length")
    del meta[VERSIONS]
    with pytest.raises(EngineError, match="2 tokens and 0 versions"):
        drawn(meta, token_versions=True)
    meta["finish_reason"] = {"type": "abort"}
    assert drawn(meta, token_versions=True) == Response([], [], [], "abort")


@pytest.mark.parametrize(("experts", "dtype"), [(255, "uint8"), (256, "int16")])
def test_routes_have_a_row_for_each_token_but_the_last(experts: int, dtype: str) -> None:
    format = RouteFormat(layers=(1, 2), topk=2, experts=experts)
    rows = np.arange(16, dtype=dtype).reshape(4, 4)
    meta = {"finish_reason": {"type": "length"}, VERSIONS: [5, 7], ROUTES: base64.b64encode(rows.tobytes()).decode()}
    meta["output_token_logprobs"] = [(-0.5, 3, None), (-1.5, 4, None)]
    routes = drawn(meta, token_versions=True, routes=format, tokens_before=3).routes
    assert routes is not None and routes.dtype == rows.dtype and np.array_equal(routes, rows)
    assert drawn(meta, token_versions=True).routes is None
    with pytest.raises(EngineError, match="16 entries of routes, expected 4 for each of 5 tokens"):
        drawn(meta, token_versions=True, routes=format, tokens_before=4)
    del meta[ROUTES]  # aborted in SGLang's queue, after it was retracted
    with pytest.raises(EngineError, match="0 entries of routes, expected 4 for each of 4 tokens"):
        drawn(meta, token_versions=True, routes=format, tokens_before=3)
    meta["finish_reason"] = {"type": "abort"}
    assert drawn(meta, token_versions=True, routes=format, tokens_before=3) == Response([], [], [], "abort")


def test_each_taker_gets_its_samples_alone() -> None:
    responses = PendingResponses(LOG)
    responses.submitted(range(4))
    with pytest.raises(UserError, match="sample 3 is in flight already"):
        responses.submitted([4, 3])
    responses.add({0: ONE, 2: ONE, 3: ONE})
    assert responses.take(0.0, 1.0, {1, 2}) == {2: ONE}
    threading.Timer(0.05, responses.add, [{1: ONE}]).start()
    assert responses.take(60.0, 100.0, {1, 2}) == {1: ONE}
    assert responses.take(0.0, 1.0, None) == {0: ONE, 3: ONE}
    responses.submitted([4, 3])


def test_what_is_forgotten_is_taken_by_nobody() -> None:
    responses = PendingResponses(LOG)
    responses.submitted(range(3))
    responses.add({0: ONE})
    responses.forget([0, 1])
    responses.add({1: ONE, 2: ONE})
    assert responses.take(0.0, 1.0, None) == {2: ONE}


def test_an_engine_that_comes_no_further_or_fails_is_an_error_of_who_waits() -> None:
    responses = PendingResponses(LOG)
    assert responses.take(0.0, 0.0, None) == {}  # nothing is in flight
    responses.submitted(range(3))
    responses.came_further(2)
    assert responses.take(0.0, 100.0, None) == {}
    assert responses.take(0.0, 0.0, {7}) == {}
    with pytest.raises(EngineError, match=r"came no further within 0 s: no token since .*, 2 of 3 responses .* log$"):
        responses.take(0.01, 0.0, None)
    responses.add({0: ONE})
    responses.fail("rollout engine died")
    responses.fail("rollout engine is gone")
    assert responses.take(0.0, 100.0, None) == {0: ONE}
    for _ in range(2):
        with pytest.raises(EngineError, match="rollout engine died"):
            responses.take(60.0, 100.0, None)


def test_the_time_of_a_transfer_is_no_stall() -> None:
    responses = PendingResponses(LOG)
    responses.submitted([1])
    responses._further_at -= 1000
    with pytest.raises(EngineError, match="came no further within 500 s"):
        responses.take(0.0, 500.0, None)
    responses.resume()
    assert responses.take(0.0, 500.0, None) == {}


def test_a_sample_is_taken_once_and_its_id_is_free_only_then() -> None:
    responses = PendingResponses(LOG)
    responses.submitted([1])
    responses.check_known([1])
    responses.add({1: Response([5], [-1.0], [0], "stop")})
    with pytest.raises(UserError, match="sample 1 is in flight already"):
        responses.submitted([1])
    assert list(responses.take(0.0, 1.0, {1})) == [1]
    with pytest.raises(EngineError, match="sample 1 is not in flight: it was not submitted, or was taken already"):
        responses.check_known([1])
    responses.submitted([1])
