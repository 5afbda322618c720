"""Ports, and what is in force of the network's settings."""

from __future__ import annotations

import importlib.util
import mmap
import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from engine3d.errors import UserError
from hybridflow.cluster.hosts.network.interfaces import Interface
from hybridflow.cluster.hosts.network.network_settings import (
    PRESETS,
    NetworkConfig,
    PortRange,
    Preset,
    as_environment,
    check_used,
    settings_in_force,
)
from hybridflow.config.reading.yaml_loader import SettingsError
from hybridflow.config.recipe import load_recipe
from hybridflow.planning.checks.recipe import check_recipe
from tests.support.runs import DEMO


@pytest.mark.parametrize(("text", "first", "last"), [("29400", 29400, 29400), (" 29400-29499 ", 29400, 29499)])
def test_ports_are_one_or_a_range(text: str, first: int, last: int) -> None:
    results = PortRange.parse(text)
    assert (results.first, results.last, len(results)) == (first, last, last - first + 1)
    assert str(results) == text.strip()


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "ports '': expected one or a range, such as 29400 or 29400-29499"),
        ("http", "ports 'http': expected one or a range, such as 29400 or 29400-29499"),
        ("1-2-3", "ports '1-2-3': expected one or a range, such as 29400 or 29400-29499"),
        ("29499-29400", "ports 29499-29400: expected 1024 to 65535, the lower one first"),
        ("80", "ports 80: expected 1024 to 65535, the lower one first"),
        ("70000", "ports 70000: expected 1024 to 65535, the lower one first"),
    ],
)
def test_what_is_no_range_is_refused(text: str, refusal: str) -> None:
    with pytest.raises(UserError) as refused:
        PortRange.parse(text)
    assert str(refused.value) == refusal


def test_free_ports_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert PortRange(port, port).free("127.0.0.1", 10) == 0
        assert 0 < PortRange(port - 100, port + 99).free("127.0.0.1", 200) < 200
        assert PortRange(port, port + 99).free("127.0.0.1", 1) == 0


ETH0 = Interface("eth0", "10.0.0.1")


def in_force(config: NetworkConfig, interface: Interface | None = ETH0, **environ: str) -> dict[str, tuple[str, str]]:
    return {item.name: (item.value, item.origin) for item in settings_in_force(config, interface, environ)}


def test_without_a_recipe_s_word_the_interface_alone_is_set() -> None:
    assert in_force(NetworkConfig()) == {
        "GLOO_SOCKET_IFNAME": ("eth0", "interface eth0"),
        "NCCL_SOCKET_IFNAME": ("=eth0", "interface eth0"),
    }
    ipv6 = in_force(NetworkConfig(), Interface("eth0", "fd00::1"))
    assert ipv6["NCCL_SOCKET_FAMILY"] == ("AF_INET6", "interface eth0")
    assert in_force(NetworkConfig(), None) == {}


def test_a_preset_gives_way_to_the_environment_and_that_to_the_recipe() -> None:
    config = NetworkConfig(preset="roce", environment={"NCCL_IB_TC": "96", "UCX_TLS": "rc"})
    results = in_force(config, NCCL_IB_TC="41", NCCL_IB_TIMEOUT="18", NCCL_DEBUG="WARN", HOME="/root")
    assert results == {
        "GLOO_SOCKET_IFNAME": ("eth0", "interface eth0"),
        "NCCL_DEBUG": ("WARN", "environment"),
        "NCCL_IB_TC": ("96", "recipe"),
        "NCCL_IB_TIMEOUT": ("18", "environment"),
        "NCCL_NET": ("IB", "preset roce"),
        "NCCL_SOCKET_IFNAME": ("=eth0", "interface eth0"),
        "TORCH_FR_BUFFER_SIZE": ("2000", "preset roce"),
        "UCX_TLS": ("rc", "recipe"),
    }
    assert list(results) == sorted(results)
    settings = settings_in_force(config, ETH0, {})
    assert as_environment(settings)["NCCL_IB_TC"] == "96"
    assert "NCCL_NET=IB (preset roce)" in map(str, settings)


def test_an_interface_of_the_recipe_comes_before_the_environment_and_one_that_was_found_after() -> None:
    environ: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert in_force(NetworkConfig(), **environ)["GLOO_SOCKET_IFNAME"] == ("eth7", "environment")
    named = in_force(NetworkConfig(interface="eth0"), **environ)
    assert named["GLOO_SOCKET_IFNAME"] == ("eth0", "interface eth0")


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_the_libraries_know_the_variables_of_the_presets(preset: Preset) -> None:
    results = in_force(NetworkConfig(preset=preset), Interface("eth0", "fd00::1"))
    libraries = [  # the smallest first, which knows most of them
        *Path(importlib.util.find_spec("nvidia.nccl").submodule_search_locations[0]).glob("lib/libnccl.so*"),  # type: ignore
        *Path(importlib.util.find_spec("torch").origin).parent.glob("lib/libtorch*.so"),  # type: ignore
    ]
    required = {name.encode() for name in results if not name.startswith("FI_")}  # libfabric is not installed here
    for library in libraries:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            required -= {name for name in required if text.find(name + b"\0") >= 0}
    assert required == set()


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        (
            {"environment": {"PATH": "/tmp"}},
            "'PATH' is no variable of the network: expected a name that begins with",
        ),
        ({"environment": {"LD_PRELOAD": "x"}}, "'LD_PRELOAD' is no variable of the network"),
        ({"environment": {"NCCL_": "x"}}, "'NCCL_' is no variable of the network"),
        ({"environment": {"nccl_debug": "x"}}, "'nccl_debug' is no variable of the network"),
        ({"environment": {"NCCL_DEBUG": "a\nb"}}, "NCCL_DEBUG: a line break in a value"),
        ({"environment": {"NCCL_DEBUG": True}}, "Input should be a valid string"),
        (
            {"interface": "eth0", "environment": {"NCCL_SOCKET_IFNAME": "eth1"}},
            "environment.NCCL_SOCKET_IFNAME and interface=eth0 are both set; expected one of them",
        ),
        ({"ports": "http"}, "ports 'http': expected one or a range, such as 29400 or 29400-29499"),
        ({"preset": "myrinet"}, "Input should be 'ethernet', 'roce', 'infiniband' or 'efa'"),
        ({"interface": ""}, "String should have at least 1 character"),
    ],
)
def test_what_is_no_setting_of_a_network_is_refused(settings: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValidationError) as refused:
        NetworkConfig(**settings)
    [error] = refused.value.errors()
    assert refusal in error["msg"] and "\n" not in error["msg"]


def test_numbers_are_taken_as_text() -> None:
    config = NetworkConfig(ports=29400, environment={"NCCL_IB_TC": 106})  # type: ignore[arg-type, dict-item]
    assert config.environment == {"NCCL_IB_TC": "106"}
    assert config.port_range == PortRange(29400, 29400)
    assert NetworkConfig().port_range is None
    assert [NetworkConfig(preset=preset).locks_memory for preset in PRESETS] == [False, True, True, True]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"preset": "roce"}, "network.preset=roce"),
        ({"interface": "eth0"}, "network.interface=eth0"),
        ({"environment": {"NCCL_DEBUG": "INFO"}}, "network.environment"),
    ],
)
def test_a_network_that_nobody_would_use_is_refused(settings: dict[str, Any], said: str) -> None:
    config = NetworkConfig(**settings)
    check_used(config, 2, None)
    check_used(NetworkConfig(), 1, "auto")
    with pytest.raises(UserError) as refused:
        check_used(config, 1, None)
    assert str(refused.value).startswith(f"{said} is set with one host, on which nothing goes over a network; expected")
    with pytest.raises(UserError) as refused:
        check_used(config, 2, "auto")
    assert str(refused.value).startswith(f"{said} is set with placement.cluster, whose processes have")


def test_ports_are_for_several_hosts() -> None:
    check_used(NetworkConfig(ports="29400-31399"), 2, None)
    with pytest.raises(
        UserError, match=r"^network\.ports=29400-31399 is set with one host, on which nothing goes over"
    ):
        check_used(NetworkConfig(ports="29400-31399"), 1, None)


def test_a_recipe_has_the_section_and_a_run_on_one_host_refuses_it() -> None:
    recipe = load_recipe(DEMO, ["network.preset=ethernet", "network.environment={NCCL_IB_TC: 106}"])
    assert recipe.network.preset == "ethernet" and recipe.network.environment == {"NCCL_IB_TC": "106"}
    with pytest.raises(SettingsError, match=r"network\.preset=ethernet is set with one host"):
        check_recipe(recipe)
    with pytest.raises(SettingsError, match=r"network\.environment: 'PATH' is no variable of the network"):
        load_recipe(DEMO, ["network.environment={PATH: x}"])
