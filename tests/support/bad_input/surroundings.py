"""Surroundings that a command starts in: directories, limits, standard output."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.bad_input.place import Case, Place

SURROUNDINGS = [
    Case("run-dir-is-a-device", lambda at: at.check("", "run_dir=/dev/null"), r"run_dir: /dev/null is a file"),
    Case(
        "run-dir-in-a-file",
        lambda at: at.check("", f"run_dir={at.write('file', '')}/runs"),
        r"run_dir: .*file is a file",
    ),
    Case("run-dir-read-only", lambda at: at.check("", "run_dir=/proc/runs"), r"run_dir: /proc/runs/demo cannot"),
    Case("run-dir-name", lambda at: at.check("", f"name={'a' * 300}"), r"name"),
    Case("shm-read-only", lambda at: at.check(), r"shared memory: .*Read-only", mounts={"/dev/shm": "read-only"}),
    Case("shm-full", lambda at: at.check(), r"shared memory: .*No space left", mounts={"/dev/shm": "full"}),
    Case("run-dir-full", lambda at: in_runs(at, "check"), r"run_dir: .*No space left", mounts={"HERE/runs": "full"}),
    Case("train-full", lambda at: in_runs(at, "train"), r"run_dir: .*No space left", mounts={"HERE/runs": "full"}),
    Case("report-full", lambda at: full_report(at), r"report.html: No space left", mounts={"HERE/full": "full"}),
    Case("optimised", lambda at: at.check(), r"PYTHONOPTIMIZE", environment={"PYTHONOPTIMIZE": "2"}, imported=False),
    Case("few-files", lambda at: ["train", at.recipe()], r"open files: 128", open_files=128),
    Case("check-few-files", lambda at: at.check(), r"open files: 128", open_files=128),
    Case("full-output", lambda at: at.check(), r"standard output cannot be written: No space", code=1, stdout="full"),
    Case(
        "full-output-inspect",
        lambda at: ["checkpoint", "inspect", at.checkpoint()],
        r"standard output cannot be written",
        code=1,
        stdout="full",
    ),
    Case(
        "full-output-report",
        lambda at: ["report", at.run()],
        r"standard output cannot be written",
        code=1,
        stdout="full",
    ),
    Case(
        "full-output-help",
        lambda at: ["--help"],
        r"standard output cannot be written",
        code=1,
        stdout="full",
        imported=False,
    ),
    Case("closed-output", lambda at: at.check("seed: -1"), r"seed = -1", stdout="closed"),
]


def in_runs(at: Place, command: str) -> Sequence[object]:
    (at.directory / "runs").mkdir()
    return [command, at.recipe(), f"run_dir={at.directory}/runs"]


def full_report(at: Place) -> Sequence[object]:
    at.run()
    (at.directory / "full").mkdir()
    return ["report", at.directory / "run", "--out", at.directory / "full/report.html"]
