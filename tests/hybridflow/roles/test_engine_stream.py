"""An engine's stream: the call that its rank's heartbeat reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import GIVEN, Request, Response
from hybridflow.roles.rollout import EngineStream
from hybridflow.workers.rank_process import _Pulse


class _Engine:
    """Ends the responses that it is told to."""

    config = SimpleNamespace(token_versions=False)
    stats = None

    def __init__(self) -> None:
        self.ending: list[int] = []

    def submit(self, requests: Sequence[Request], together: bool) -> None:
        pass

    def take_ended(self, wait_s: float, samples: Mapping[int, Any]) -> dict[int, Response]:
        ended, self.ending = self.ending, []
        return {sample: Response([], [], []) for sample in ended}


def test_the_heartbeat_reports_generation_while_what_was_submitted_together_is_in_flight() -> None:
    pulse, engine = _Pulse("rollout", 0, None), _Engine()
    stream = EngineStream(0, engine, pulse.at)  # type: ignore[arg-type]

    def submit(sample: int, *, together: bool) -> str:
        stream.submit([Request(sample, [1], SamplingConfig())], together)
        return pulse._beat().method

    def end(*samples: int) -> str:
        engine.ending += samples
        stream.take_ended(0.0)
        return pulse._beat().method

    with pulse.at("start"):
        pass
    assert submit(1, together=False) == ""
    assert submit(2, together=True) == submit(3, together=True) == "generate"
    assert end(2) == "generate"
    assert end(3) == ""  # the first request is still in flight
    assert submit(4, together=True) == "generate"
    with pulse.at("begin_weights"):
        assert end(4) == end(1) == "begin_weights"
        assert submit(5, together=True) == "generate"
    assert pulse._beat().method == "generate"
    assert end(5) == ""
    assert submit(6, together=True) == "generate"
    stream.close()  # the engine died
    assert pulse._beat().method == ""


def test_a_call_that_waits_for_its_turn_does_so_whatever_ends_meanwhile() -> None:
    pulse = _Pulse("rollout", 0, None)
    assert pulse._beat().method == "start"
    generating = pulse.at("generate")
    with pulse.at("update"):
        with pulse.waiting_for_turn():
            with generating:
                assert (pulse._beat().method, pulse._beat().has_turn) == ("generate", True)
            assert (pulse._beat().method, pulse._beat().has_turn) == ("update", False)
        assert pulse._beat().has_turn
    assert pulse._beat().method == ""


def test_a_turn_of_an_episode_comes_back_with_its_tokens_and_is_no_sample() -> None:
    class Engine(_Engine):
        def take_ended(self, wait_s: float, samples: Mapping[int, Any]) -> dict[int, Response]:
            return {
                1: Response([5, 9, 6], [-1.0, 0.0, -1.0], [3, GIVEN, 4], "stop"),
                2: Response([5], [-1.0], [4], "abort"),
                3: Response([7], [-1.0], [4], "length"),
            }

    stream = EngineStream(0, Engine(), _Pulse("rollout", 0, None).at)  # type: ignore[arg-type]
    stream.submit([Request(sample, [1], SamplingConfig(), turn_start=0) for sample in (1, 2)])
    stream.submit([Request(3, [1], SamplingConfig())])
    ends, summary, packed = stream.take_ended(0.0)
    assert summary is not None and summary.per_sample["sample_ids"].tolist() == [3]
    by_sample = {end.sample: end for end in ends.samples}
    turns = {sample: end.turn.token_ids for sample, end in by_sample.items() if end.turn is not None}
    assert packed is not None and turns == {1: [5, 9, 6]}
    assert ends.samples[0].sample == 3  # the first rows are of the first ends
    assert (by_sample[1].complete, by_sample[1].oldest, by_sample[2].complete) == (True, 3, False)
