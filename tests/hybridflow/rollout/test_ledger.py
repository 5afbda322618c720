"""Every drawn prompt is trained on once, with no samples older than the limit, in any order of events."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hybridflow.rollout.ledger import Group, Ledger, StreamLimits


def _draws() -> Callable[[int], Iterator[tuple[int, int]]]:
    numbers = itertools.count()
    return lambda count: ((number, number % 7) for number in itertools.islice(numbers, count))


def _ledger(groups: int, staleness: int = 0, **limits: object) -> Ledger:
    return Ledger(StreamLimits(groups, staleness, **limits), _draws())  # type: ignore[arg-type]


def _begin(ledger: Ledger, version: int) -> list[int]:
    admitted = [group.number for group in ledger.admit()]
    for number in admitted:
        ledger.sent(number, version)
    return admitted


def _complete(ledger: Ledger, version: int, *numbers: int) -> None:
    for number in numbers:
        ledger.completed(number, version)


def _numbers(groups: tuple[Group, ...]) -> list[int]:
    return [group.number for group in groups]


def test_a_synchronous_step_takes_all_that_it_began_and_begins_nothing_while_it_trains() -> None:
    ledger = _ledger(3)
    assert _begin(ledger, 1) == [0, 1, 2]
    assert ledger.capacity == 0
    _complete(ledger, 1, 2, 0)
    assert ledger.take(1) is None
    _complete(ledger, 1, 1)
    taken = ledger.take(1)
    assert taken is not None
    assert (_numbers(taken.groups), taken.staleness, taken.carried) == ([0, 1, 2], (0, 0, 0), 0)
    assert ledger.admit() == ()
    ledger.trained()
    assert _begin(ledger, 2) == [3, 4, 5]


def test_a_stream_runs_ahead_by_the_steps_that_it_may() -> None:
    ledger = _ledger(2, 2)
    assert _begin(ledger, 0) == [0, 1, 2, 3, 4, 5]
    _complete(ledger, 0, 5, 1)
    taken = ledger.take(0)
    assert taken is not None and _numbers(taken.groups) == [1, 5]
    assert ledger.capacity == 0
    ledger.trained()
    assert _begin(ledger, 1) == [6, 7]
    _complete(ledger, 1, 6)
    _complete(ledger, 0, 0)
    taken = ledger.take(1)
    assert taken is not None and (_numbers(taken.groups), taken.staleness) == ([0, 6], (1, 0))


def test_groups_that_no_later_step_could_train_on_are_waited_for_and_come_first() -> None:
    ledger = _ledger(2, 1)
    assert _begin(ledger, 0) == [0, 1, 2, 3]
    _complete(ledger, 0, 2, 3)
    assert ledger.take(0) is not None
    ledger.trained()
    assert _begin(ledger, 1) == [4, 5]
    _complete(ledger, 1, 4, 5)
    assert ledger.take(1) is None
    _complete(ledger, 0, 1)
    assert ledger.take(1) is None
    _complete(ledger, 0, 0)
    taken = ledger.take(1)
    assert taken is not None and (_numbers(taken.groups), taken.staleness) == ([0, 1], (1, 1))


def test_late_groups_are_queued_again_where_a_step_needs_none_of_them_and_are_begun_first() -> None:
    ledger = _ledger(2, 1, late="evict")
    _begin(ledger, 0)
    _complete(ledger, 0, 2, 3)
    assert ledger.take(0) is not None
    ledger.trained()
    _begin(ledger, 1)
    _complete(ledger, 0, 0)
    _complete(ledger, 1, 5)
    taken = ledger.take(1)
    assert taken is not None
    assert (_numbers(taken.groups), _numbers(taken.evicted), taken.dropped) == ([0, 5], [1], ())
    assert ledger.returned == (Group(1, 1, attempt=1),)
    ledger.trained()
    assert [(group.number, group.attempt) for group in ledger.admit()] == [(1, 1), (6, 0), (7, 0)][:3]


def test_a_step_takes_the_first_of_more_than_it_needs_and_drops_the_slowest() -> None:
    ledger = _ledger(2, extra=2)
    assert _begin(ledger, 0) == [0, 1, 2, 3]
    _complete(ledger, 0, 3)
    assert ledger.take(0) is None
    _complete(ledger, 0, 1)
    taken = ledger.take(0)
    assert taken is not None
    assert (_numbers(taken.groups), _numbers(taken.dropped), taken.evicted) == ([1, 3], [0, 2], ())
    assert ledger.capacity == 0
    ledger.trained()
    assert _begin(ledger, 1) == [0, 2, 4, 5]


def test_a_step_drops_the_late_ones_of_more_than_it_needs_and_waits_for_no_more_than_are_left() -> None:
    ledger = _ledger(2, 1, extra=1)
    assert _begin(ledger, 0) == [0, 1, 2, 3, 4]
    _complete(ledger, 0, 4, 3)
    taken = ledger.take(0)
    assert taken is not None and (_numbers(taken.groups), _numbers(taken.dropped)) == ([3, 4], [0])
    ledger.trained()
    assert _begin(ledger, 1) == [0, 5, 6]
    _complete(ledger, 1, 0, 5)
    assert ledger.take(1) is None  # one can be dropped
    _complete(ledger, 0, 2)
    taken = ledger.take(1)
    assert taken is not None
    assert (_numbers(taken.groups), _numbers(taken.dropped), taken.evicted) == ([0, 2], [1], ())
    assert taken.staleness == (0, 1)


def test_groups_that_a_step_leaves_can_continue() -> None:
    ledger = _ledger(2, 2, extra=1, excess="carry")
    assert _begin(ledger, 0) == list(range(7))
    _complete(ledger, 0, 6, 5)
    taken = ledger.take(0)
    assert taken is not None and (_numbers(taken.groups), taken.dropped, taken.carried) == ([5, 6], (), 1)
    ledger.trained()
    assert _begin(ledger, 1) == [7, 8]


@pytest.mark.parametrize(("queue", "first"), [("oldest_first", [0, 1]), ("freshest_first", [4, 5])])
def test_the_queue_orders_the_complete_groups_that_a_step_takes(queue: str, first: list[int]) -> None:
    ledger = _ledger(2, 2, queue=queue)
    _begin(ledger, 0)
    _complete(ledger, 0, *range(6))
    taken = ledger.take(0)
    assert taken is not None and _numbers(taken.groups) == first


def test_complete_groups_that_have_become_too_old_are_replaced() -> None:
    ledger = _ledger(1, 1, queue="freshest_first")
    assert _begin(ledger, 0) == [0, 1]
    _complete(ledger, 0, 0, 1)
    taken = ledger.take(0)
    assert taken is not None and _numbers(taken.groups) == [1]
    ledger.trained()
    assert _begin(ledger, 1) == [2]
    assert ledger.evict(1) == ()
    assert _numbers(ledger.evict(2)) == [
        0,
    ]
    with pytest.raises(ValueError, match="the oldest is 2"):
        ledger.take(3)
    assert _numbers(ledger.admit()) == [0]


def test_a_group_that_is_lost_is_begun_again_before_others() -> None:
    ledger = _ledger(2)
    _begin(ledger, 0)
    ledger.lost(0)
    assert ledger.admit() == (Group(0, 0, attempt=1),)
    with pytest.raises(ValueError, match="group 7 completed, and is not in flight"):
        ledger.completed(7, 0)
    ledger.completed(1, 0)
    with pytest.raises(ValueError, match="group 1 completed, and is complete already"):
        ledger.completed(1, 0)


def test_nothing_is_drawn_beyond_the_last_step() -> None:
    ledger = _ledger(2, 1)
    ledger.draws_left = 3
    assert len(ledger.admit()) == ledger.buffered == 3
    ledger.lost(1)
    assert ledger.buffered == 3
    assert _numbers(ledger.admit()) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("late", ["wait", "evict"])
@pytest.mark.parametrize("queue", ["oldest_first", "freshest_first"])
@pytest.mark.parametrize(("extra", "excess"), [(0, "drop"), (3, "drop"), (3, "carry")])
def test_each_prompt_is_trained_on_once(staleness: int, late: str, queue: str, extra: int, excess: str) -> None:
    if excess == "carry" and not staleness:
        with pytest.raises(ValueError, match="too old for the next"):
            StreamLimits(4, staleness, extra, excess="carry")
        return
    chance = random.Random(f"{staleness}{late}{queue}{extra}{excess}")
    limits = {"late": late, "queue": queue, "extra": extra, "excess": excess}
    ledger, trained, oldest = _ledger(4, staleness, **limits), list[int](), dict[int, int]()
    for version in range(60):
        evicted = {group.number for group in ledger.evict(version)}
        while True:
            for number in _begin(ledger, version):
                oldest[number] = version
            buffered = ledger.state()["groups"]
            assert len(buffered) <= (staleness + 1) * 4 + extra
            assert ledger.ready == sum(group["oldest"] is not None for group in buffered)
            assert ledger.in_flight == len(buffered) - ledger.ready
            if (taken := ledger.take(version)) is not None:
                break
            waiting = [group["number"] for group in ledger.state()["groups"] if group["oldest"] is None]
            number = chance.choice(waiting)
            if chance.random() < 0.1:
                ledger.lost(number)
            else:
                ledger.completed(number, oldest[number])
        assert len(taken.groups) == 4 and max(taken.staleness) <= staleness
        assert not evicted & set(_numbers(taken.groups)) or late == "evict" or queue == "freshest_first" or extra
        trained += _numbers(taken.groups)
        if version % 9 == 5:  # over a restart
            state = ledger.state()
            ledger.trained()
            following = _ledger(4, staleness, **limits)
            following._draw = ledger._draw
            for group in following.restore(state):
                following.sent(group.number, version)
                oldest[group.number] = version
            assert following.state() == state
            ledger = following
        ledger.trained()
    assert len(set(trained)) == len(trained)
    buffered = {group["number"] for group in ledger.state()["groups"]} | set(_numbers(ledger.returned))
    assert set(trained) | buffered == set(range(max(set(trained) | buffered) + 1))


def test_over_a_restart_groups_keep_the_order_in_which_they_were_completed() -> None:
    """A step drops the groups completed last, whatever their numbers."""
    ledger = _ledger(2, 0, extra=2)
    _begin(ledger, 0)
    for number in (3, 0, 2, 1):
        ledger.completed(number, 0)
    state = json.loads(json.dumps(ledger.state()))
    following = _ledger(2, 0, extra=2)
    assert following.restore(state) == ()
    assert following.state() == ledger.state()
    order = [entry.group.number for entry in sorted(following._entries.values(), key=following._slowness)]
    assert order == [entry.group.number for entry in sorted(ledger._entries.values(), key=ledger._slowness)]
    assert order == [1, 2, 0, 3]
    for group in state["groups"]:  # as older checkpoints have it
        del group["place"]
    older = _ledger(2, 0, extra=2)
    older.restore(state)
    assert [group["place"] for group in older.state()["groups"]] == [0, 1, 2, 3]


class _Watched(dict[int, Any]):
    """Counter of passes over all its values."""

    looked_at = 0

    def values(self) -> Any:
        self.looked_at += 1
        return super().values()

    def items(self) -> Any:
        self.looked_at += 1
        return super().items()


def test_asking_for_a_step_does_not_look_at_every_group() -> None:
    ledger = _ledger(500, 4)
    _begin(ledger, 0)
    entries = ledger._entries = _Watched(ledger._entries)
    for number in range(499):
        ledger.completed(number, 0)
        assert ledger.take(0) is None and (ledger.ready, ledger.in_flight) == (number + 1, 2499 - number)
    assert entries.looked_at == 0
    ledger.completed(2000, 0)
    assert ledger.take(0) is not None and entries.looked_at
