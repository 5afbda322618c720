"""Decisions of a stream, as lines of a run's events."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

from benchmarks.virtual_clock import run
from hybridflow.rollout.ledger import Group, StreamLimits
from hybridflow.rollout.stream.events import StreamEvents
from hybridflow.rollout.stream.groups import StepRows
from tests.hybridflow.rollout.stream.test_stream import SAMPLES, _Setup


def _all(steps: list[StepRows], event: str) -> list[dict[str, Any]]:
    return [line for rows in steps for line in rows.events if line["event"] == event]


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
        for event in rows.events:
            if event["event"] == "admitted":
                firsts |= {group: first for group, _, _, first in event["groups"]}
            elif event["event"] == "sent":
                pairs = zip(event["samples"], event["engines"], strict=True)
                sent |= {sample: (engine, event["version"]) for sample, engine in pairs}
            elif event["event"] in ("evicted", "dropped"):
                returned += event["groups"]
        took = rows.events[-1]
        assert took["event"] == "took" and took["version"] == number
        assert took["groups"] == [group.group.number for group in rows.groups]
        assert took["staleness"] == list(rows.taken.staleness) and took["carried"] == rows.taken.carried
        for group in rows.groups:
            assert firsts[group.group.number] == group.ended[0].sample
            for end in group.ended:
                engine, version = sent[end.sample]
                assert engine in (0, 1) and version <= end.oldest
    groups = {group[0] for event in _all(steps, "admitted") for group in event["groups"] if group[2]}
    assert groups <= set(returned) and returned  # attempts after the first are of what went back
    aborted = set(chain.from_iterable(event["samples"] for event in _all(steps, "aborted")))
    trained = {end.sample for rows in steps for group in rows.groups for end in group.ended}
    assert aborted and not aborted & trained
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
