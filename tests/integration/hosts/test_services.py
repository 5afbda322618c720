"""sshd and Slurm on the hosts of a test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.hosts import Hosts

pytestmark = [pytest.mark.processes, pytest.mark.hosts]


def test_ssh_runs_a_command_with_a_bare_environment(hosts_with_sshd: tuple[Hosts, Path]) -> None:
    hosts, config = hosts_with_sshd
    for name in ("host-0", "host-1", "host-2"):
        assert hosts[0].run(["ssh", "-F", config, name, "hostname"], check=True).stdout == f"{name}\n"
    environment = hosts[0].run(["ssh", "-F", config, "host-1", "env"], env={"SECRET": "1"} | PATHS, check=True).stdout
    assert "SECRET" not in environment and str(Path(sys.prefix)) not in environment
    failed = hosts[0].run(["ssh", "-F", config, "host-1", "exit 7"])
    assert failed.returncode == 7
    assert not hosts[1].left_files()


def test_a_host_that_is_not_known_is_refused(hosts_with_sshd: tuple[Hosts, Path]) -> None:
    hosts, config = hosts_with_sshd
    refused = hosts[0].run(["ssh", "-F", config, "-o", "UserKnownHostsFile=/dev/null", "host-1", "hostname"])
    assert refused.returncode == 255 and "Host key verification failed" in refused.stderr


def test_sshd_listens_on_the_clusters_address(hosts_with_sshd: tuple[Hosts, Path]) -> None:
    hosts, _ = hosts_with_sshd
    assert {(socket.address, socket.port) for socket in hosts[2].sockets()} == {(hosts[2].address, 22)}


def test_srun_starts_one_task_a_host(hosts_with_slurm: Hosts) -> None:
    words = (
        "echo $(hostname) $SLURM_NODEID $SLURM_PROCID $SLURM_LOCALID $SLURM_NNODES $SLURM_NTASKS $SLURM_JOB_NODELIST"
    )
    done = hosts_with_slurm[0].run(["srun", "-N3", "--label", "bash", "-c", words], check=True)
    assert sorted(done.stdout.splitlines()) == [f"{i}: host-{i} {i} {i} 0 3 3 host-[0-2]" for i in range(3)]


def test_sbatch_waits_for_its_script(hosts_with_slurm: Hosts) -> None:
    hosts = hosts_with_slurm
    script = "#!/bin/bash\nscontrol show hostnames\nsrun hostname | sort\nexit 3\n"
    done = hosts[1].run(["sbatch", "--wait", "-N3", "--output=/tmp/job"], input=script, timeout_s=240)
    assert done.returncode == 3, done.stderr
    assert hosts[0].path("/tmp/job").read_text().split() == ["host-0", "host-1", "host-2"] * 2  # its first node's
    hosts[0].run(["rm", "/tmp/job"], check=True)
    assert not any(host.left_files() or host.processes() for host in hosts)


PATHS = {"PATH": "/usr/bin:/bin"}
