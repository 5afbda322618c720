"""Refusals, warnings and their words, and tables of many hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.cluster.devices.gpu_availability import EXPECTED
from hybridflow.cluster.hosts.checks.comparison import Comparison, compare, ranges
from hybridflow.cluster.hosts.checks.facts import ClockDifference, HostFacts, Lack
from hybridflow.cluster.hosts.description import Host, HostRole
from tests.support.work import growth

H200 = ("NVIDIA H200 of 150.0 GB",) * 8
VALUES: dict[str, str | None] = {
    **dict.fromkeys(("hybridflow", "torch", "megatron-core", "sglang", "ray", "numpy"), "1.0"),
    "transformer-engine": "2.9",
    "CPython": "3.12.1",
    "code": "c0de" * 16,
    "commit": "abcdef1234567890",
    "driver": "580.1",
    "GPUs": "8 x NVIDIA H200 of 150.0 GB",
    "cores": "128",
    "memory": "2,100 GB",
    "run_dir": "nfs4 filer:/runs",
    "open files": "1048576",
}
FACTS = HostFacts(VALUES, H200, run_dir="/runs", sees_mark=True)
FILES = Lack("refuse", "open files", "512", "at least 1,024 (ulimit -Hn)")
USED = Lack("refuse", "GPUs in use by others", "GPU 0 (40.0 of 150.8 GB, pid 77 python3)", EXPECTED)


def cluster(count: int, changes: dict[int, dict[str, Any]] | None = None) -> list[HostFacts]:
    """Hosts that are alike but for changes of some."""
    results = []
    for index in range(count):
        clock = ClockDifference(0.01 * (index % 3), 0.05) if index else None
        host = Host(index, f"host-{index}", f"10.0.0.{index + 1}")
        results.append(replace(FACTS, host=host, clock=clock, **(changes or {}).get(index, {})))
    return results


def values(**changes: str | None) -> dict[str, Any]:
    return {"values": VALUES | {name.replace("_", "-"): value for name, value in changes.items()}}


def lines(compared: Comparison) -> list[tuple[str, str]]:
    return [(finding.severity, str(finding)) for finding in compared.findings]


def test_hosts_that_are_alike_are_found_right() -> None:
    compared = compare(cluster(64))
    assert compared.findings == ()
    assert compared.table == (
        "64 hosts alike in all 18 facts: torch 1.0, GPUs 8 x NVIDIA H200 of 150.0 GB, cores 128, memory 2,100 GB"
    )
    assert compare(cluster(1)).findings == ()


def test_the_odd_one_out_is_named() -> None:
    compared = compare(cluster(64, {7: values(transformer_engine="2.8")}))
    [finding] = compared.findings
    assert str(finding) == "transformer-engine: 2.9 on host-0, host-1 and 61 more; 2.8 on host-7"
    assert finding.hosts == ("host-7",)
    assert compared.refusals == (finding,) and not compared.warnings
    assert compared.table.splitlines() == [
        "hosts            transformer-engine",
        "host-[0-6,8-63]  2.9",
        "host-7           2.8",
        "64 hosts alike in 17 of 18 facts",
    ]


@pytest.mark.parametrize(
    ("changes", "severity", "line"),
    [
        (values(torch="1.1"), "refuse", "torch: 1.0 on host-0, host-1; 1.1 on host-2"),
        (values(ray="1.1"), "refuse", "ray: 1.0 on host-0, host-1; 1.1 on host-2"),
        (values(sglang="none"), "refuse", "sglang: 1.0 on host-0, host-1; none on host-2"),
        (values(megatron_core="2"), "refuse", "megatron-core: 1.0 on host-0, host-1; 2 on host-2"),
        (values(hybridflow="2"), "refuse", "hybridflow: 1.0 on host-0, host-1; 2 on host-2"),
        (values(numpy="2"), "warn", "numpy: 1.0 on host-0, host-1; 2 on host-2"),
        (values(CPython="3.13.0"), "refuse", "CPython: 3.12 on host-0, host-1; 3.13 on host-2"),
        (values(CPython="3.12.9"), "warn", "CPython: 3.12.1 on host-0, host-1; 3.12.9 on host-2"),
        (
            values(code="beef" * 16, commit="abcdef1234567890*"),
            "refuse",
            "code of hybridflow: commit abcdef12 (text c0dec0de) on host-0, host-1; "
            "commit abcdef12 with changes (text beefbeef) on host-2",
        ),
        (values(commit="1234567890"), "warn", "commit: abcdef12 on host-0, host-1; 12345678 on host-2"),
        (values(driver="590"), "warn", "NVIDIA driver: 580.1 on host-0, host-1; 590 on host-2"),
        (
            {"gpus": ("NVIDIA H100 of 85.0 GB",) * 8},
            "refuse",
            "GPUs: NVIDIA H200 of 150.0 GB on host-0, host-1; NVIDIA H100 of 85.0 GB on host-2",
        ),
        (
            {"gpus": (*H200[:7], "one that cannot be read (GPU is lost)")},
            "refuse",
            "GPUs: NVIDIA H200 of 150.0 GB on host-0, host-1; NVIDIA H200 of 150.0 GB and one that cannot be read "
            "(GPU is lost) on host-2",
        ),
        ({"gpus": H200[:7]}, "warn", "number of GPUs: 8 on host-0, host-1; 7 on host-2"),
        ({"lacks": (FILES,)}, "refuse", "open files: 512 on host-2; expected at least 1,024 (ulimit -Hn)"),
        (
            {"sees_mark": False, "values": VALUES | {"run_dir": "ext4 /dev/sda1"}},
            "warn",
            "run_dir: another directory at /runs (ext4 /dev/sda1) on host-2; expected the directory that host 0 sees "
            "at /runs (host 0 has nfs4 filer:/runs); without it logs are sent to host 0, and checkpoints, exports and "
            "models that the run makes need another place",
        ),
        (
            {"lacks": (USED,)},
            "refuse",
            "GPUs in use by others: GPU 0 (40.0 of 150.8 GB, pid 77 python3) on host-2; expected them free, or "
            "placement.shared_gpus=true",
        ),
    ],
)
def test_each_difference_has_its_line(changes: dict[str, Any], severity: str, line: str) -> None:
    compared = compare(cluster(3, {2: changes}))
    assert lines(compared) == [(severity, line)]
    assert compared.findings[0].hosts == ("host-2",)


def test_hosts_that_lack_the_same_are_in_one_line() -> None:
    less = replace(FILES, value="256")
    compared = compare(cluster(4, {1: {"lacks": (FILES, USED)}, 2: {"lacks": (less,)}, 3: {"lacks": (FILES,)}}))
    assert [str(finding).partition(";  expected")[0] for finding in compared.findings] == [
        "open files: 512 on host-1, host-3; 256 on host-2; expected at least 1,024 (ulimit -Hn)",
        "GPUs in use by others: GPU 0 (40.0 of 150.8 GB, pid 77 python3) on host-1; expected them free, or "
        "placement.shared_gpus=true",
    ]


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        (ClockDifference(1.9, 0.0), []),
        (ClockDifference(5.0, 4.0), []),
        (ClockDifference(40.0, 30.0), ["warn"]),
        (ClockDifference(-2.5, 0.1), ["warn"]),
        (ClockDifference(-31.0, 0.5), ["refuse"]),
    ],
)
def test_clocks_are_held_against_what_is_certain(clock: ClockDifference, expected: list[str]) -> None:
    reports = cluster(3)
    reports[1] = replace(reports[1], clock=clock)
    compared = compare(reports)
    assert [finding.severity for finding in compared.findings] == expected
    if expected == ["refuse"]:
        assert str(compared.findings[0]) == (
            "clock: 31.0 s behind host 0's on host-1; expected at most 30 s apart (NTP)"
        )
    assert ("clock" in compared.table) == bool(expected)


def test_a_clock_is_measured_with_half_of_the_round_trip_as_uncertainty() -> None:
    measured = ClockDifference.measured(100.0, 103.5, 101.0)
    assert (measured.seconds, measured.uncertainty_s, measured.least_s) == (3.0, 0.5, 2.5)
    assert ClockDifference.measured(100.0, 100.9, 101.0).least_s == 0.0


def test_kinds_of_gpus_may_differ_between_roles() -> None:
    other = ("NVIDIA L40S of 150.0 GB",) * 4
    reports = cluster(4, {2: {"gpus": other}, 3: {"gpus": other}})
    assert [finding.what for finding in compare(reports).findings] == ["GPUs", "number of GPUs"]
    roles: list[HostRole] = ["train", "train", "rollout", "rollout"]
    apart = [replace(item, host=replace(item.host, role=role)) for item, role in zip(reports, roles, strict=True)]
    assert compare(apart).findings == ()
    apart[3] = replace(apart[3], gpus=H200)
    assert lines(compare(apart))[0] == (
        "refuse",
        "GPUs of role rollout: NVIDIA L40S of 150.0 GB on host-2; NVIDIA H200 of 150.0 GB on host-3",
    )


def test_refusals_come_first_and_what_is_not_known_is_not_compared() -> None:
    reports = cluster(3, {1: values(driver="590"), 2: values(code="dead" * 16)})
    assert [finding.severity for finding in compare(reports).findings] == ["refuse", "warn"]
    assert compare(cluster(3, {1: {"values": {}, "gpus": ()}})).refusals == ()


def test_hosts_of_one_name_are_told_apart_by_their_addresses() -> None:
    reports = cluster(3, {2: values(ray="2.0")})
    same = [replace(report, host=replace(report.host, name="node")) for report in reports]
    assert str(compare(same).findings[0]) == "ray: 1.0 on node (10.0.0.1), node (10.0.0.2); 2.0 on node (10.0.0.3)"


def _every_third(index: int) -> dict[str, Any]:
    return values(torch="1.1") if index % 3 == 0 else {}


@pytest.mark.parametrize("change", [_every_third, lambda index: {"lacks": (FILES,) if index % 3 else ()}])
def test_512_hosts_stay_readable(change: Callable[[int], dict[str, Any]]) -> None:
    compared = compare(cluster(512, {index: change(index) for index in range(512)}))
    assert len(compared.table.splitlines()) <= 4
    assert len(compared.findings) == 1
    half, complete = (cluster(hosts, {index: change(index) for index in range(hosts)}) for hosts in (256, 512))
    assert growth(compare, half, complete) < 2.2  # no pair of hosts is looked at
    assert len(str(compared.findings[0])) < 400


def test_many_values_of_one_thing_are_counted() -> None:
    reports = cluster(6, {index: values(ray=f"2.{index}") for index in range(6)})
    line = str(compare(reports).findings[0])
    assert line == "ray: 2.0 on host-0; 2.1 on host-1; 2.2 on host-2; 2.3 on host-3; 2 more values"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a"], "a"),
        (["host-1"], "host-1"),
        (["host-0", "host-1", "host-2", "host-5"], "host-[0-2,5]"),
        (["n08", "n09", "n10", "login"], "n[08-10], login"),
        (["gpu1.example", "gpu2.example"], "gpu[1-2].example"),
    ],
)
def test_names_that_follow_each_other_are_shortened(names: list[str], expected: str) -> None:
    assert ranges(names) == expected
