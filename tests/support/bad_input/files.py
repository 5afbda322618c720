"""Prompts, checkpoints, and what a run has written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.bad_input.place import DIGITS, Case, Place, alias_bomb, nested

DATA = [
    Case("pipe", lambda at: at.check_data(at.pipe(at.directory / "p.jsonl")), r"p.jsonl.* named pipe"),
    Case("device", lambda at: at.check_data(Path("/dev/zero")), r"/dev/zero.* device"),
    Case("directory", lambda at: at.check_data(at.directory), r"directory"),
    Case("sparse", lambda at: at.check_data(at.sparse(at.directory / "p.jsonl", 8 << 30)), r"p.jsonl:1: .*at most"),
    Case("nested", lambda at: at.check_data(at.write("p.jsonl", nested("[", "]", 100_000))), r"p.jsonl:1: .*nested"),
    Case(
        "nested-field",
        lambda at: at.check_data(at.write("p.jsonl", '{"prompt": "1", "answer": ' + nested("[", "]", 300) + "}")),
        r"p.jsonl:1: .*nested",
    ),
    Case(
        "digits",
        lambda at: at.check_data(at.write("p.jsonl", f'{{"prompt": "1", "answer": {DIGITS}}}')),
        r"p.jsonl:1: .*digits",
    ),
    Case(
        "surrogates", lambda at: at.check_data(at.write("p.jsonl", '{"prompt": "\\ud800", "answer": "1"}')), r"prompt"
    ),
    Case("binary", lambda at: at.check_data(at.write("p.jsonl", b"\xff\xfe\n")), r"p.jsonl.*UTF-8"),
    Case(
        "long-answer",
        lambda at: at.check_data(at.write("p.jsonl", json.dumps({"prompt": [1] * 100_000, "answer": 1}))),
        r"p.jsonl:1: .{1,300}$",
    ),
    Case(
        "null-byte",
        lambda at: at.check("", "data.source=jsonl", 'data.jsonl={train_path: "a\\0b", eval_path: b}'),
        r"null",
    ),
    Case(
        "many-prompts",
        lambda at: at.check_data(at.write("p.jsonl", '{"prompt": "x"}\n' * 100_000)),
        r"p.jsonl:1: no field",
    ),
]

CHECKPOINTS = [
    Case("manifest-pipe", lambda at: with_manifest(at, at.pipe), r"manifest.json.* named pipe"),
    Case("manifest-device", lambda at: with_manifest(at, at.device), r"manifest.json.* device"),
    Case(
        "manifest-nested", lambda at: inspect(at, manifest__json=nested("[", "]", 100_000)), r"manifest.json .*nested"
    ),
    Case(
        "manifest-digits", lambda at: inspect(at, manifest__json=f'{{"format": {DIGITS}}}'), r"manifest.json .*digits"
    ),
    Case("manifest-binary", lambda at: inspect(at, manifest__json=b"\xff\xfe"), r"manifest.json "),
    Case(
        "manifest-some",
        lambda at: inspect(at, manifest__json=f'{{"format": 1, "recipe": {nested("[", "]", 900)}}}'),
        r"manifest.json .*nested",
    ),
    Case("manifest-null", lambda at: with_entry(at, "a\0b"), r"manifest.json is damaged: .*a"),
    Case("manifest-name", lambda at: with_entry(at, "x" * 300), r"manifest.json is damaged: its checksum"),
    Case("run-manifest-pipe", lambda at: of_run(with_manifest(at, at.pipe)), r"manifest.json.* named pipe"),
    Case("export-manifest-device", lambda at: export(with_manifest(at, at.device), at), r"manifest.json.* device"),
    Case("driver-nested", lambda at: resume(at, "driver.json", nested("[", "]", 100_000)), r"driver.json.*nested"),
    Case("driver-digits", lambda at: resume(at, "driver.json", f'{{"step": {DIGITS}}}'), r"driver.json.*digits"),
    Case("driver-list", lambda at: resume(at, "driver.json", "[]"), r"driver.json"),
    Case(
        "driver-null",
        lambda at: resume_with(at, buffer=["a\0\x1bb"]),
        r"driver: buffer: \['a\\x00\\x1bb'\], expected one name such as",
    ),
    Case(
        "saved-config-nested",
        lambda at: resume(at, "model/config.json", nested("[", "]", 9000)),
        r"config.json: .*nested",
    ),
    Case("null-byte-resume", lambda at: at.check("", 'resume="a\\0b"'), r"null"),
    Case("null-byte-dir", lambda at: at.check("", 'checkpoint={save_interval: 1, dir: "a\\0b"}'), r"null"),
]


def inspect(at: Place, **files: str | bytes) -> Sequence[object]:
    return ["checkpoint", "inspect", at.checkpoint(**files)]


def with_manifest(at: Place, make: Callable[[Path], Path]) -> Sequence[object]:
    directory = at.checkpoint()
    make(directory / "manifest.json")
    return ["checkpoint", "inspect", directory]


def with_entry(at: Place, name: str) -> Sequence[object]:
    directory = at.checkpoint()
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["files"][0]["path"] = name
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return ["checkpoint", "verify", directory]


def of_run(words: Sequence[object]) -> Sequence[object]:
    return ["checkpoint", "inspect", Path(str(words[2])).parents[1]]


def export(words: Sequence[object], at: Place) -> Sequence[object]:
    return ["checkpoint", "export", words[2], at.directory / "out"]


def resume(at: Place, name: str, text: str) -> Sequence[object]:
    """A checkpoint of the demo whose manifest knows a file as it is now: damaged before it was saved."""
    return _changed(at, name, lambda _: text)


def resume_with(at: Place, **changes: Any) -> Sequence[object]:
    """A checkpoint of the demo in whose driver's state some values are others."""
    return _changed(at, "driver.json", lambda text: json.dumps({**json.loads(text), **changes}))


def _changed(at: Place, name: str, change: Callable[[str], str]) -> Sequence[object]:
    directory = at.resumable()
    file = directory / name
    file.write_text(change(file.read_text() if file.exists() else ""))
    at.describe(directory)
    return at.check("", f"resume={directory}")


REPORTS = [
    Case("alias-bomb", lambda at: ["report", at.run(recipe__yaml=alias_bomb())], r"recipe.yaml:\d+: .*10,000 values"),
    Case(
        "recipe-nested",
        lambda at: ["report", at.run(recipe__yaml=nested("[", "]", 50_000))],
        r"recipe.yaml:1: .*nested",
    ),
    Case("recipe-digits", lambda at: ["report", at.run(recipe__yaml=f"seed: {DIGITS}")], r"recipe.yaml:1: .*digits"),
    Case("recipe-key", lambda at: ["report", at.run(recipe__yaml="? [1]\n: 2")], r"recipe.yaml:1: .*key"),
    Case("recipe-pipe", lambda at: report_with(at, "recipe.yaml", at.pipe), r"recipe.yaml.* named pipe"),
    Case("metrics-pipe", lambda at: report_with(at, "metrics.jsonl", at.pipe), r"metrics.jsonl.* named pipe"),
    Case("metrics-device", lambda at: report_with(at, "metrics.jsonl", at.device), r"metrics.jsonl.* device"),
    Case(
        "metrics-nested",
        lambda at: ["report", at.run(metrics__jsonl=nested("[", "]", 100_000) + "\n")],
        r"metrics.jsonl:1: .*nested",
    ),
    Case(
        "metrics-digits",
        lambda at: ["report", at.run(metrics__jsonl=f'{{"phase": "train", "step": 1, "x": {DIGITS}}}\n')],
        r"metrics.jsonl:1: ",
    ),
    Case(
        "metrics-step",
        lambda at: ["report", at.run(metrics__jsonl=f'{{"phase": "train", "step": {"9" * 400}, "x": 1}}\n')],
        r"metrics.jsonl:1: ",
    ),
    Case(
        "metrics-figure",
        lambda at: ["report", at.run(metrics__jsonl=f'{{"phase": "train", "step": 1, "x": {"9" * 400}}}\n')],
        r"metrics.jsonl:1: ",
    ),
    Case(
        "metrics-value",
        lambda at: ["report", at.run(metrics__jsonl='{"phase": "train", "step": 1, "x": {}}\n')],
        r"metrics.jsonl:1: ",
    ),
    Case(
        "metrics-sparse",
        lambda at: report_with(at, "metrics.jsonl", lambda path: at.sparse(path, 8 << 30)),
        r"metrics.jsonl.*at most",
    ),
    Case(
        "timeline-nested",
        lambda at: ["report", at.run(timeline__json=nested("[", "]", 100_000))],
        r"timeline.json.*nested",
    ),
    Case("timeline-list", lambda at: ["report", at.run(timeline__json="[1]")], r"timeline.json is no timeline"),
    Case(
        "timeline-event",
        lambda at: ["report", at.run(timeline__json='{"traceEvents": [{"name": "a", "ph": "X", "pid": {}}]}')],
        r"timeline.json",
    ),
    Case("timeline-huge", lambda at: ["report", at.run(timeline__json=timeline(1e300))], r"timeline.json"),
    Case("timeline-nan", lambda at: ["report", at.run(timeline__json=timeline(float("nan")))], r"timeline.json"),
    Case(
        "timeline-sparse",
        lambda at: report_with(at, "timeline.json", lambda path: at.sparse(path, 8 << 30)),
        r"timeline.json.*at most",
    ),
    Case("timeline-pipe", lambda at: report_with(at, "timeline.json", at.pipe), r"timeline.json.* named pipe"),
    Case(
        "devices-nested",
        lambda at: ["report", at.run(devices__jsonl=nested("[", "]", 100_000) + "\n")],
        r"devices.jsonl:1: .*nested",
    ),
    Case("devices-pipe", lambda at: report_with(at, "devices.jsonl", at.pipe), r"devices.jsonl.* named pipe"),
    Case(
        "devices-sparse",
        lambda at: report_with(at, "devices.jsonl", lambda path: at.sparse(path, 8 << 30)),
        r"devices.jsonl.*at most",
    ),
]


def report_with(at: Place, name: str, make: Callable[[Path], Path]) -> Sequence[object]:
    directory = at.run()
    make(directory / name)
    return ["report", directory]


def timeline(when: float) -> str:
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "actor"}}]
    events += [
        {"name": "commit_weights", "ph": "X", "pid": 0, "tid": 0, "ts": began, "dur": 1.0} for began in (0.0, when)
    ]
    return json.dumps({"traceEvents": events})
