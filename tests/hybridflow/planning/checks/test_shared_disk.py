"""Refusals of a run on hosts that share no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.cluster.devices.device_map import Device
from hybridflow.cluster.hosts.description import Host
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.shared_disk import refusals, shared_files

DEMO = "launch/recipes/demo.yaml"
HOSTS = [Host(index, f"host-{index}", f"10.0.0.1{index}") for index in range(3)]
NOTHING = (
    "model={path: /models/small, create: null}",
    "trainer.export=false",
    "warmup=null",
    "checkpoint.save_interval=null",
)


def on(*nodes: int) -> tuple[Device, ...]:
    return tuple(Device(node, "cpu", 0) for node in nodes)


def refused(*overrides: str, actor: tuple[int, ...] = (0, 1), rollout: tuple[int, ...] = (2,)) -> dict[str, list[str]]:
    """The settings that are refused, and the hosts that are named; only `/shared` is seen by all."""
    recipe = load_recipe(DEMO, [*NOTHING, *overrides])

    def apart(directory: Path) -> list[int]:
        return [] if directory.is_relative_to("/shared") else [1, 2]

    devices = {"actor": on(*actor), "rollout": on(*rollout), "reward": on(rollout[0]), "reference": on(*actor)}
    lines = refusals(list(shared_files(recipe)), devices, HOSTS, apart)
    return {
        line.split(":")[0]: [host.name for host in HOSTS[1:] if host.name in line.partition("; expected")[0]]
        for line in lines
    }


def test_a_run_that_shares_nothing_runs() -> None:
    assert refused() == {}


@pytest.mark.parametrize(
    ("setting", "named", "hosts"),
    [
        ("checkpoint.save_interval=2", "checkpoint.save_interval=2", ["host-1"]),
        ("trainer.export=true", "trainer.export=true", ["host-1"]),
        ("rollout.verify_weights=true", "rollout.verify_weights=true", ["host-1", "host-2"]),
    ],
)
def test_each_setting_is_named_with_the_hosts_that_would_have_to_share(
    setting: str, named: str, hosts: list[str]
) -> None:
    assert refused(setting) == {named: hosts}


def test_what_the_driver_makes_is_for_all() -> None:
    files = list(shared_files(load_recipe(DEMO, ["warmup=null"])))
    lines = refusals(files, {"actor": on(0), "rollout": on(2), "reward": on(2)}, HOSTS, lambda _: [1, 2])
    assert [line.partition(": ")[0] for line in lines] == ["model.create"]
    assert "which is another directory on host-2 than on host-0; expected model.path, or run_dir on a disk" in lines[0]


def test_checkpoints_may_lie_where_all_see_them() -> None:
    assert refused("checkpoint={dir: /shared/checkpoints, save_interval: 2}") == {}
    assert refused("checkpoint={dir: /own/checkpoints, save_interval: 2}") == {"checkpoint.save_interval=2": ["host-1"]}


def test_a_trainer_on_the_first_host_alone_saves_and_exports_there() -> None:
    saving = ("checkpoint.save_interval=2", "trainer.export=true")
    assert refused(*saving, actor=(0, 0), rollout=(1, 2)) == {}


def test_a_reference_begins_with_what_has_been_warmed_up() -> None:
    warmed = ("warmup={steps: 2}", "algorithm.kl_coef=0.1")
    recipe = load_recipe(DEMO, [*NOTHING, *warmed])
    assert list(recipe.models) == ["reference"]
    assert refused(*warmed) == {"warmup": ["host-1"]}
    assert refused(*warmed, "checkpoint.dir=/shared/checkpoints") == {}
