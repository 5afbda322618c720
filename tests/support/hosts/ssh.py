"""sshd on every host, and what a client needs to get in."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.hosts.host import Host
from tests.support.hosts.namespaces import HostsUnavailable

SSHD = "/usr/sbin/sshd"
DIRECTORY = Path("/run/ssh-of-tests")
READY_S = 120.0

SERVER = """
Port 22
ListenAddress {address}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
UsePAM no
StrictModes no
PidFile none
PrintMotd no
"""
CLIENT = """
Host *
User root
IdentityFile {directory}/key
IdentitiesOnly yes
UserKnownHostsFile {directory}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
BatchMode yes
ConnectTimeout 10
"""


def start(hosts: Sequence[Host]) -> Path:
    """See `Hosts.start_sshd`."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        raise HostsUnavailable("sshd is not installed (Debian: openssh-server)")
    first = hosts[0].path(DIRECTORY)
    public = {}
    for host in hosts:
        host.path(DIRECTORY).mkdir(mode=0o700)
        host.path("/run/sshd").mkdir(mode=0o755)  # where sshd locks its unprivileged part in
        _make_key(host, "host_key")
        public[host] = " ".join((host.path(DIRECTORY) / "host_key.pub").read_text().split()[:2])
    _make_key(hosts[0], "key")
    texts = {
        "key": (first / "key").read_text(),
        "key.pub": (first / "key.pub").read_text(),
        "known_hosts": "".join(f"{host.name},{host.address} {key}\n" for host, key in public.items()),
        "config": CLIENT.format(directory=DIRECTORY),
    }
    startup = Path.home() / ".bashrc"  # what this machine sets there is no part of a test
    for host in hosts:
        files = texts | {"sshd_config": SERVER.format(address=host.address, directory=DIRECTORY)}
        for name, text in files.items():
            path = host.path(DIRECTORY) / name
            path.touch(mode=0o600)
            path.write_text(text)
        if startup.is_file():
            host.run(["mount", "--bind", "/dev/null", startup], check=True)
        host.serve([SSHD, "-D", "-e", "-f", str(DIRECTORY / "sshd_config")], DIRECTORY, Path("/run/sshd"))
    deadline = time.monotonic() + READY_S
    for host in hosts:
        while not any(socket.port == 22 for socket in host.sockets()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{host.name}: sshd does not listen: {host.path('/run/sshd.log').read_text()}")
            time.sleep(0.01)
    return DIRECTORY / "config"


def _make_key(host: Host, name: str) -> None:
    host.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", DIRECTORY / name], check=True)
