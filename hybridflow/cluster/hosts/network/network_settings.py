"""The network of a run: `network:` in a recipe, and what it means to NCCL, gloo and libfabric."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from engine3d.errors import UserError, shortened
from engine3d.rendezvous import PORTS_VARIABLE
from engine3d.settings import Settings
from hybridflow.cluster.hosts.network.interfaces import Interface
from hybridflow.rundir.status.hosts_file import NetworkSetting

Preset = Literal["ethernet", "roce", "infiniband", "efa"]

_FLIGHT_RECORDER = {
    # Of torch: the last collective operations of a rank, for the dump at a timeout.
    "TORCH_FR_BUFFER_SIZE": "2000",
}
_INFINIBAND = {
    # NCCL refuses to start where there is no such device; by itself it would take sockets, at a tenth of the rate.
    "NCCL_NET": "IB",
    # 4.096 us * 2^22 = 17 s for each of 7 attempts: longer than a link takes to come back. NCCL's own is 20, for 4 s.
    "NCCL_IB_TIMEOUT": "22",
}
PRESETS: dict[Preset, dict[str, str]] = {
    "ethernet": _FLIGHT_RECORDER
    | {
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        # NCCL's documentation names 4 and 4 for networks of 100 Gb/s: one connection does not fill them.
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
    "roce": _FLIGHT_RECORDER
    | _INFINIBAND
    | {
        # DSCP 26, which switches without losses for RoCE put into priority 3. The GID index is left to NCCL, which
        # since 2.21 takes the one of RoCE v2 by itself.
        "NCCL_IB_TC": "106",
    },
    "infiniband": _FLIGHT_RECORDER | _INFINIBAND,
    "efa": _FLIGHT_RECORDER
    | {
        # The plugin aws-ofi-nccl has this name in every version; NCCL refuses to start without it.
        "NCCL_NET": "AWS Libfabric",
        "FI_PROVIDER": "efa",
        # libfabric refuses a device that cannot do it, in place of going through host memory.
        "FI_EFA_USE_DEVICE_RDMA": "1",
    },
}
"""Environment variables of each kind of network, by their names in NCCL 2.28, torch 2.11 and libfabric."""

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_", "FI_", "UCX_", "TP_")
"""Prefixes of the variables that `network.environment` may hold."""
_VARIABLE = re.compile(rf"({'|'.join(PREFIXES)})[A-Z0-9_]+")
_READS_MEMORY = ("roce", "infiniband", "efa")

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_FIRST_PORT, _LAST_PORT = 1024, 65535
PORTS_OF_A_HOST = 64
"""Ports of `network.ports` that have to be free on every host: the smallest run takes as many on its first one."""


@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports that servers of a run may listen on, both ends included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Parse "29400" or "29400-29499".

        Raises:
            UserError: it is neither.
        """
        matched = _PORTS.fullmatch(text.strip())
        if matched is None:
            raise UserError(f"ports {shortened(text)!r}: expected one or a range, such as 29400 or 29400-29499")
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if not _FIRST_PORT <= first <= last <= _LAST_PORT:
            raise UserError(f"ports {text.strip()}: expected {_FIRST_PORT} to {_LAST_PORT}, the lower one first")
        return cls(first, last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    def free(self, address: str, most: int) -> int:
        """Count the free ports among the first `most` at an address of this host."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return sum(
            _is_free(family, address, port) for port in range(self.first, min(self.last, self.first + most - 1) + 1)
        )


_Text = Annotated[str, Field(coerce_numbers_to_str=True)]


class NetworkConfig(Settings):
    """The network between the hosts of a launch. On one host nothing goes over a network, and none of this is taken.

    What is already in the environment of a host stays, but for what is named here: `environment` and `interface`.
    """

    preset: Preset | None = None
    """Kind of network between the hosts: sets variables of NCCL, torch and libfabric, which docs/network.md lists; NCCL
    chooses by itself if null."""
    interface: str | None = Field(None, min_length=1, max_length=15)
    """Name of the network interface of the cluster, the same on every host; on each host the one that routes to host 0
    if null."""
    ports: _Text | None = None
    """Range of ports, such as 29400-31399, in which Ray, stores and probes of a run listen; any free ones if null.
    Process groups of gloo and NCCL take any port."""
    environment: dict[str, _Text] = Field(default_factory=dict)
    """Other variables of NCCL, gloo, torch, libfabric and UCX for every rank: their names begin with NCCL_, GLOO_,
    TORCH_NCCL_, TORCH_FR_, FI_, UCX_ or TP_."""

    @field_validator("ports")
    @classmethod
    def _is_a_range(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(PortRange.parse(value))
        except UserError as error:
            raise ValueError(str(error)) from None

    @field_validator("environment")
    @classmethod
    def _is_of_a_network(cls, value: dict[str, str]) -> dict[str, str]:
        wrong = [name for name in value if _VARIABLE.fullmatch(name) is None]
        if wrong:
            raise ValueError(
                f"{shortened(wrong[0])!r} is no variable of the network: expected a name that begins with "
                f"{', '.join(PREFIXES)}"
            )
        if broken := [name for name, setting in value.items() if "\0" in setting or "\n" in setting]:
            raise ValueError(f"{broken[0]}: a line break in a value, expected one line")
        return value

    @model_validator(mode="after")
    def _names_one_interface(self) -> NetworkConfig:
        twice = [name for name in _of_interface(Interface("", "")) if name in self.environment]
        if self.interface is not None and twice:
            raise ValueError(
                f"environment.{twice[0]} and interface={self.interface} are both set; expected one of them"
            )
        return self

    @property
    def port_range(self) -> PortRange | None:
        """`ports`; None for any."""
        return None if self.ports is None else PortRange.parse(self.ports)

    @property
    def port_environment(self) -> dict[str, str]:
        """Environment of a process whose servers take ports of the range."""
        ports = self.port_range
        return {} if ports is None else {PORTS_VARIABLE: f"{ports.first}-{ports.last}"}

    @property
    def locks_memory(self) -> bool:
        """True if the network's devices read memory by themselves, which has to be locked for it."""
        return self.preset in _READS_MEMORY


def settings_in_force(
    config: NetworkConfig, interface: Interface | None, environ: Mapping[str, str]
) -> list[NetworkSetting]:
    """Every variable of the network that is in force on a host, by name, and where it comes from.

    A recipe's own words come before the host's environment, and that before what is derived: the preset's variables and
    an interface that was found by its route.

    Args:
        config: of the recipe.
        interface: of the cluster on this host; None where everything stays on one host.
        environ: of this host's agent.
    """
    matched: dict[str, NetworkSetting] = {}

    def take(values: Mapping[str, str], origin: str) -> None:
        matched.update({name: NetworkSetting(name, value, origin) for name, value in values.items()})

    if config.preset is not None:
        take(PRESETS[config.preset], f"preset {config.preset}")
    if interface is not None:
        take(_of_interface(interface), f"interface {interface.name}")
    take({name: value for name, value in environ.items() if _VARIABLE.fullmatch(name)}, "environment")
    if interface is not None and config.interface == interface.name:
        take(_of_interface(interface), f"interface {interface.name}")
    take(config.environment, "recipe")
    return sorted(matched.values(), key=lambda setting: setting.name)


def as_environment(settings: Sequence[NetworkSetting]) -> dict[str, str]:
    """The environment of a rank in which settings are in force."""
    return {setting.name: setting.value for setting in settings}


def check_used(config: NetworkConfig, hosts: int, cluster: str | None) -> None:
    """Refuse settings of a network that nobody would take.

    Args:
        config: of the recipe.
        hosts: of the launch; 1 without one.
        cluster: `placement.cluster`.

    Raises:
        UserError: names the first of them, and where to set it.
    """
    given = config.model_dump(exclude_defaults=True)
    if not given:
        return
    name, value = next(iter(given.items()))
    said = f"network.{name}{'' if name == 'environment' else f'={value}'}"
    if cluster is not None:
        raise UserError(
            f"{said} is set with placement.cluster, whose processes have the environment of their own Ray; expected it "
            "in the environment of `ray start` on every host"
        )
    if hosts == 1:
        raise UserError(
            f"{said} is set with one host, on which nothing goes over a network; expected several (a launch, or "
            "hybridflow check --nodes), or no such setting"
        )


def _of_interface(interface: Interface) -> dict[str, str]:
    """Variables by which process groups find an interface."""
    # NCCL takes a name for the beginning of one, so that eth1 would be eth10 too, unless it begins with "=".
    named = {"GLOO_SOCKET_IFNAME": interface.name, "NCCL_SOCKET_IFNAME": f"={interface.name}"}
    return named | ({"NCCL_SOCKET_FAMILY": "AF_INET6"} if ":" in interface.address else {})


def _is_free(family: socket.AddressFamily, where: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as trying:
        trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as create_server
        try:
            trying.bind((where, port))
        except OSError:
            return False
    return True
