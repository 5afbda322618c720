"""Hosts of one cluster: namespaces on this machine, joined by a switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.hosts import slurm, ssh
from tests.support.hosts.host import Host
from tests.support.hosts.namespaces import HostsUnavailable
from tests.support.hosts.network import Switch, cluster_address


class Hosts(Sequence[Host]):
    """All hosts of a cluster, in order."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = list(hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:  # type: ignore[override]
        return self._hosts[index]

    def start_sshd(self) -> Path:
        """Start sshd on every host; any host then runs `ssh -F FILE host-1 COMMAND` with the file that is returned.

        Raises:
            HostsUnavailable: sshd is not installed.
        """
        return ssh.start(self)

    def start_slurm(self) -> None:
        """Start Slurm: its controller on the first host, a node on every one; srun and sbatch then work on all.

        Raises:
            HostsUnavailable: Slurm is not installed.
        """
        slurm.start(self)


@contextlib.contextmanager
def make_hosts(
    count: int,
    *,
    shared: Path | None = None,
    private: Sequence[Path] = (),
    ipv6: bool = False,
    dead_end: bool = False,
) -> Iterator[Hosts]:
    """Hosts `host-0`, `host-1` and so on; all that they are ends with the context, or with this process.

    Each has its own processes, network, host name, /etc/hosts, /tmp, /dev/shm and /run. The rest of the file system is
    this machine's.

    Args:
        count: how many.
        shared: a directory that all see, also where it is below /tmp.
        private: directories that are empty at first, and each host's own: there is no shared disk.
        ipv6: whether `eth0` has an IPv6 address and no other; an IPv4 address and no other if not.
        dead_end: whether each has an `eth1` too, on which it reaches nobody.

    Raises:
        HostsUnavailable: this machine makes no hosts.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        raise HostsUnavailable("namespaces are made by root on Linux")
    for program, package in (("ip", "iproute2"), ("tc", "iproute2")):
        if shutil.which(program) is None:
            raise HostsUnavailable(f"{program} is not installed (Debian: {package})")
    addresses = {f"host-{index}": cluster_address(index, ipv6=ipv6) for index in range(count)}
    etc_hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
    etc_hosts = f"127.0.0.1 localhost\n::1 localhost ip6-localhost\n{etc_hosts}"
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(contextlib.closing(Switch()))
        hosts = [
            stack.enter_context(contextlib.closing(Host(name, address, etc_hosts, switch, shared, list(private))))
            for name, address in addresses.items()
        ]
        for namespaces in (switch, *hosts):
            namespaces.wait_until_up()
        try:
            switch.connect([(host, host.address) for host in hosts], dead_end=dead_end)
        except RuntimeError as error:
            raise HostsUnavailable(str(error)) from error
        for host in hosts:
            host.connected()
        yield Hosts(hosts)


@contextlib.contextmanager
def hosts_or_skip(
    count: int,
    *,
    shared: Path | None = None,
    private: Sequence[Path] = (),
    ipv6: bool = False,
    dead_end: bool = False,
) -> Iterator[Hosts]:
    """`make_hosts`; the test is skipped where there can be none, or no sshd or Slurm that it asks them for."""
    try:
        with make_hosts(count, shared=shared, private=private, ipv6=ipv6, dead_end=dead_end) as hosts:
            yield hosts
    except HostsUnavailable as error:
        pytest.skip(str(error))
