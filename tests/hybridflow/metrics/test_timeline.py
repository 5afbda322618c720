"""The timeline: what it keeps, and the file that a viewer reads."""

from __future__ import annotations

import json
from pathlib import Path

from hybridflow.metrics.timeline import Timeline, TimelineSpan


def test_the_last_spans_are_kept_in_the_order_of_their_beginnings() -> None:
    timeline = Timeline(most_spans=3)
    spans = [TimelineSpan("actor", 0, "update", float(second), second + 0.5) for second in range(4)]
    timeline.record([spans[0], spans[3]])
    timeline.record([spans[2], spans[1]])
    assert timeline.spans == (spans[1], spans[2], spans[3])
    timeline.clear()
    assert timeline.spans == ()


def test_the_file_has_a_process_for_each_role_and_a_thread_for_each_rank(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record([TimelineSpan("critic", 1, "values", 10.5, 12.0), TimelineSpan("actor", 0, "update", 10.0, 10.25)])
    timeline.record([TimelineSpan("critic", 0, "values", 11.0, 11.5)])
    path = tmp_path / "timeline.json"
    timeline.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(named.values()) == ["actor", "critic"]
    threads = [(named[event["pid"]], event["tid"]) for event in events if event["name"] == "thread_name"]
    assert threads == [("actor", 0), ("critic", 0), ("critic", 1)]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(named[event["pid"]], event["tid"], event["name"], event["ts"], event["dur"]) for event in complete] == [
        ("actor", 0, "update", 10.0e6, 0.25e6),
        ("critic", 1, "values", 10.5e6, 1.5e6),
        ("critic", 0, "values", 11.0e6, 0.5e6),
    ]
