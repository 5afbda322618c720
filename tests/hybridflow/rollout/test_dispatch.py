"""Requests go where their prefix is, then to the engine with the least, and wait here until one has room."""

from __future__ import annotations

import random

import pytest

from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import Request
from hybridflow.rollout.dispatch import Dispatcher


def _dispatcher(engines: int, limit: int, response: float = 10.0) -> Dispatcher:
    return Dispatcher(engines, limit, lambda _: response)


def _request(sample: int, group: int, tokens: int, index: int = 0) -> Request:
    return Request(sample, range(tokens), SamplingConfig(), group, index)


def _group(number: int, samples: int, tokens: int = 5) -> list[Request]:
    return [_request(number * 100 + sample, number, tokens, sample) for sample in range(samples)]


def _sent(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    return [(engine, request.sample) for engine, request in dispatcher.send()]


def test_samples_of_a_prompt_stay_together_and_groups_go_to_the_engine_with_the_least() -> None:
    dispatcher = _dispatcher(2, 8)
    dispatcher.add(*_group(1, 2, tokens=50), *_group(2, 2), *_group(3, 2), *_group(4, 1))
    assert _sent(dispatcher) == [(0, 100), (0, 101), (1, 200), (1, 201), (1, 300), (1, 301), (1, 400)]
    assert dispatcher.in_flight(0) == (2, 120)
    assert dispatcher.in_flight(1) == (5, 75)


def test_a_request_waits_until_an_engine_has_room_and_goes_to_the_first() -> None:
    dispatcher = _dispatcher(2, 1)
    dispatcher.add(*_group(1, 3))
    assert _sent(dispatcher) == [(0, 100), (1, 101)]
    assert dispatcher.waiting == 1
    assert _sent(dispatcher) == []
    dispatcher.ended(101)
    assert _sent(dispatcher) == [(1, 102)]


def test_a_group_that_has_begun_somewhere_goes_on_there() -> None:
    dispatcher = _dispatcher(3, 4)
    dispatcher.add(*_group(1, 1), *_group(2, 1), *_group(3, 1))
    assert _sent(dispatcher) == [(0, 100), (1, 200), (2, 300)]
    dispatcher.ended(300)
    dispatcher.add(_request(201, 2, 5))  # engine 2 has nothing, and engine 1 the prefix
    assert _sent(dispatcher) == [(1, 201)]


def test_an_engine_whose_weights_change_is_sent_nothing_and_of_equals_the_newest_come_first() -> None:
    dispatcher = _dispatcher(3, 2)
    dispatcher.serve_all(3)
    dispatcher.change(0)
    dispatcher.add(*_group(1, 1))
    assert _sent(dispatcher) == [(1, 100)]
    dispatcher.change(1)
    dispatcher.add(_request(101, 1, 5))  # not where its group is
    assert _sent(dispatcher) == [(2, 101)]
    dispatcher.ended(100)  # which changes nothing
    dispatcher.change(2)
    dispatcher.add(*_group(2, 1))
    assert _sent(dispatcher) == [] and [dispatcher.version(engine) for engine in range(3)] == [3, 3, 3]
    dispatcher.serve(1, 4)
    assert _sent(dispatcher) == [(1, 200)]
    dispatcher.serve(0, 3)
    dispatcher.ended(200)
    dispatcher.add(*_group(3, 1))
    assert _sent(dispatcher) == [(1, 300)] and dispatcher.version(1) == 4  # 0 has as little, and older weights


def test_what_is_given_up_is_sent_no_more_and_ends_where_it_is() -> None:
    dispatcher = _dispatcher(2, 1)
    dispatcher.add(*_group(1, 3), *_group(2, 1))
    assert _sent(dispatcher) == [(0, 100), (1, 101)]
    assert dispatcher.forget(1) == {0: [100], 1: [101]}
    assert dispatcher.waiting == 1
    assert _sent(dispatcher) == []
    dispatcher.ended(100)
    assert _sent(dispatcher) == [(0, 200)]


def test_what_an_engine_had_that_is_gone_is_known_and_goes_before_others() -> None:
    dispatcher = _dispatcher(2, 2)
    dispatcher.add(*_group(1, 2), *_group(2, 2), *_group(3, 1))
    assert _sent(dispatcher) == [(0, 100), (0, 101), (1, 200), (1, 201)]
    lost = dispatcher.remove_engine(0)
    assert [request.sample for request in lost] == [100, 101]
    dispatcher.add(*lost, first=True)
    assert _sent(dispatcher) == []
    dispatcher.ended(200)
    assert _sent(dispatcher) == [(1, 100)]
    dispatcher.add_engine(0, 2)
    assert _sent(dispatcher) == [(0, 101), (0, 300)]
    with pytest.raises(ValueError, match="engine 0 is there already"):
        dispatcher.add_engine(0, 2)


def test_the_limit_of_an_engine_can_change() -> None:
    dispatcher = _dispatcher(1, 4)
    dispatcher.add(*_group(1, 5))
    assert len(_sent(dispatcher)) == 4
    dispatcher.limit(0, 2)
    for sample in (100, 101):
        dispatcher.ended(sample)
    assert _sent(dispatcher) == []
    dispatcher.ended(102)
    assert _sent(dispatcher) == [(0, 104)]


def test_the_engine_with_the_least_is_found_however_requests_come_and_end() -> None:
    chance = random.Random(7)
    dispatcher = _dispatcher(5, 6)
    flying: dict[int, int] = {}
    for number in range(600):
        if flying and chance.random() < 0.5:
            sample = chance.choice(list(flying))
            dispatcher.ended(sample)
            del flying[sample]
        before = {engine: dispatcher.in_flight(engine) for engine in range(5)}
        dispatcher.add(_request(number, number, chance.randrange(1, 50)))
        sent = _sent(dispatcher)
        if sent:
            open_ = {engine: tokens for engine, (requests, tokens) in before.items() if requests < 6}
            assert open_[sent[0][0]] == min(open_.values())
        flying |= {sample: engine for engine, sample in sent}
        assert dispatcher.busy == len(set(flying.values()))
        assert dispatcher.tokens == pytest.approx(sum(dispatcher.in_flight(engine)[1] for engine in range(5)))
    counts = [sum(engine == other for other in flying.values()) for engine in range(5)]
    assert counts == [dispatcher.in_flight(engine)[0] for engine in range(5)]
    assert max(counts) <= 6


def test_what_is_given_up_while_it_waits_is_gone_and_the_order_of_the_rest_stays() -> None:
    dispatcher = _dispatcher(1, 1)
    dispatcher.add(*_group(1, 1), *_group(2, 2), *_group(3, 1))
    dispatcher.add(*_group(4, 2), first=True)
    assert _sent(dispatcher) == [(0, 400)]
    assert dispatcher.forget(2) == {} and dispatcher.forget(9) == {}
    assert dispatcher.waiting == 3
    order = []
    for sample in (400, 401, 100):
        dispatcher.ended(sample)
        order += _sent(dispatcher)
    assert order == [(0, 401), (0, 100), (0, 300)]
    assert dispatcher.forget(3) == {0: [300]}
    dispatcher.ended(300)
    assert (dispatcher.busy, dispatcher.tokens, dispatcher.forget(3)) == (0, 0, {})


def test_it_holds_no_more_after_many_requests_than_after_few() -> None:
    dispatcher = _dispatcher(4, 8)
    flying: list[int] = []
    for number in range(5000):
        dispatcher.add(_request(number, number, 1 + number % 97))
        flying += [sample for _, sample in _sent(dispatcher)]
        if len(flying) == 32:
            for sample in flying[:16]:
                dispatcher.ended(sample)
            del flying[:16]
        dispatcher.forget(number)
    assert len(dispatcher._heap) <= 64 + 1
    assert len(dispatcher._groups) <= 32 and len(dispatcher._in_flight) <= 32 and not dispatcher._holders
