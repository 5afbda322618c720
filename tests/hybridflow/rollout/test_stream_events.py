"""What a stream has decided, as lines of a run's events."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from benchmarks.virtual_clock import run
from hybridflow.rollout.ledger import Group, StreamLimits
from hybridflow.rollout.stream_events import StreamEvents
from hybridflow.rollout.stream_types import StepRows
from tests.hybridflow.rollout.test_stream import SAMPLES, _Setup


def _all(steps: list[StepRows], event: str) -> list[dict[str, Any]]:
    return [each for rows in steps for each in rows.events if each["event"] == event]


def test_every_sample_that_is_learned_from_was_admitted_and_sent_before() -> None:
    async def learn() -> list[StepRows]:
        setup = _Setup(StreamLimits(4, 1, extra=2))
        setup.stream.open(0)
        return [await setup.step() for _ in range(12)]

    steps, _ = run(learn())
    firsts: dict[int, int] = {}
    sent: dict[int, tuple[int, int]] = {}
    returned: list[int] = []
    for number, rows in enumerate(steps):
        json.dumps(rows.events)
        for each in rows.events:
            if each["event"] == "admitted":
                firsts |= {group: first for group, _, _, first in each["groups"]}
            elif each["event"] == "sent":
                pairs = zip(each["samples"], each["engines"], strict=True)
                sent |= {sample: (engine, each["version"]) for sample, engine in pairs}
            elif each["event"] in ("evicted", "dropped"):
                returned += each["groups"]
        took = rows.events[-1]
        assert took["event"] == "took" and took["version"] == number
        assert took["groups"] == [each.group.number for each in rows.groups]
        assert took["staleness"] == list(rows.taken.staleness) and took["carried"] == rows.taken.carried
        for each in rows.groups:
            assert firsts[each.group.number] == each.ends[0].sample
            for end in each.ends:
                engine, version = sent[end.sample]
                assert engine in (0, 1) and version <= end.oldest
    groups = {group[0] for each in _all(steps, "admitted") for group in each["groups"] if group[2]}
    assert groups <= set(returned) and returned  # attempts after the first are of what went back
    given_up = set(chain.from_iterable(each["samples"] for each in _all(steps, "given_up")))
    learned = {end.sample for rows in steps for each in rows.groups for end in each.ends}
    assert given_up and not given_up & learned
    # No line for each token or sample: what is decided in a row shares one.
    assert sum(len(rows.events) for rows in steps) < len(sent) + len(firsts)
    assert len(sent) >= 12 * 4 * SAMPLES


def test_what_is_of_another_version_has_a_line_of_its_own() -> None:
    events = StreamEvents()
    events.sent(0, 3, [7, 8])
    events.sent(1, 3, [9])
    events.sent(1, 4, [10])
    events.serves(0, 4)
    events.serves(1, 4)
    events.admitted(Group(5, 2, 1), 40)
    events.admitted(Group(6, 3), 44)
    events.returned("evicted", [])
    assert events.collect() == (
        {"event": "sent", "version": 3, "samples": [7, 8, 9], "engines": [0, 0, 1]},
        {"event": "sent", "version": 4, "samples": [10], "engines": [1]},
        {"event": "serves", "version": 4, "engines": [0, 1]},
        {"event": "admitted", "groups": [[5, 2, 1, 40], [6, 3, 0, 44]]},
    )
    assert events.collect() == ()
