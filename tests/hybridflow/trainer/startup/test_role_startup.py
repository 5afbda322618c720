"""Logs of processes that are expected from each host."""

from __future__ import annotations

from types import SimpleNamespace

from hybridflow.cluster.devices.device_map import Device
from hybridflow.roles.groups import FunctionRewardGroup, PolicyGroup, RolloutGroup, TeacherEngineGroup
from hybridflow.rundir.status.watching import TEACHER_ENGINES
from hybridflow.trainer.startup.role_startup import processes_by_host


def test_logs_are_expected_from_the_host_of_each_rank() -> None:
    specs = [
        SimpleNamespace(role="rollout", group=RolloutGroup, devices_per_rank=2),
        SimpleNamespace(role="teacher", group=TeacherEngineGroup, devices_per_rank=1),
        SimpleNamespace(role="actor", group=PolicyGroup, devices_per_rank=1),
        SimpleNamespace(role="reward", group=FunctionRewardGroup, devices_per_rank=1),
    ]
    devices = {
        "actor": [Device(0, "cuda", 0), Device(1, "cuda", 0)],
        "rollout": [Device(1, "cuda", 2), Device(1, "cuda", 3), Device(2, "cuda", 0), Device(2, "cuda", 1)],
        "reward": [Device(2, "cpu", 0)],
        "teacher": [Device(2, "cuda", 2)],
    }
    assert processes_by_host(specs, devices) == {  # type: ignore[arg-type]
        0: {"actor-0"},
        1: {"actor-1", "rollout-0", "sglang-0"},
        2: {"rollout-1", "sglang-1", "reward-0", "teacher-0", f"{TEACHER_ENGINES}-0"},
    }
