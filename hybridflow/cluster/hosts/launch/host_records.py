"""The hosts of a launch, kept in its run's directory for those who look at the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path

from hybridflow.cluster.hosts.description import Host
from hybridflow.cluster.hosts.network.network_settings import Setting
from hybridflow.errors.log import log
from hybridflow.rundir.file_names import HOSTS
from hybridflow.rundir.hosts_file import NetworkSetting, RunHost, write_hosts


def keep_hosts(directory: Path, hosts: Sequence[tuple[Host, Sequence[Setting]]], apart: Collection[int]) -> None:
    """Write the hosts and the variables of the network that are in force on each; no run fails of it.

    Args:
        directory: of the run.
        hosts: in order.
        apart: those that do not see the directory.
    """
    records = [
        RunHost(
            name=host.name,
            address=host.address,
            interface=host.interface,
            role=host.role,
            gpus=host.gpus,
            cpu_slots=host.cpu_slots,
            settings=tuple(NetworkSetting(**asdict(setting)) for setting in settings),
            shares_disk=host.index not in apart,
        )
        for host, settings in hosts
    ]
    try:
        write_hosts(directory, records)
    except OSError as error:
        log.warning(f"{directory / HOSTS} cannot be written: {error.strerror}")
