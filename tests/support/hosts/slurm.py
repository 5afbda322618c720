"""A real Slurm on the hosts: slurmctld on the first, slurmd on every one, without munge and without cgroups."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.hosts.host import Host
from tests.support.hosts.namespaces import HostsUnavailable

DIRECTORY = Path("/run/slurm-of-tests")
READY_S = 120.0
SLOTS = 64
"""CPUs that each node claims to have, so that tasks of a test do not wait for one another."""

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def start(hosts: Sequence[Host]) -> None:
    """See `Hosts.start_slurm`."""
    missing = [
        item for item in ("slurmctld", "slurmd", "srun") if shutil.which(item, path="/usr/sbin:/usr/bin") is None
    ]
    if missing:
        raise HostsUnavailable(f"{missing[0]} is not installed (Debian: slurm-wlm)")
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs={SLOTS} State=UNKNOWN" for host in hosts]
    text = CONFIGURATION.format(
        controller=hosts[0].name, address=hosts[0].address, directory=DIRECTORY, nodes="\n".join(nodes)
    )
    for host in hosts:
        for name in ("state", "spool", "etc"):
            (host.path(DIRECTORY) / name).mkdir(parents=True)
        (host.path(DIRECTORY) / "etc/slurm.conf").write_text(text)
        # Where srun and sbatch look: mounted on the directory that the package has made, of this host alone.
        host.run(["mount", "--bind", DIRECTORY / "etc", "/etc/slurm"], check=True)
    hosts[0].serve(["/usr/sbin/slurmctld", "-D"], DIRECTORY)
    for host in hosts:
        host.serve(["/usr/sbin/slurmd", "-D", "-N", host.name], DIRECTORY)
    deadline = time.monotonic() + READY_S
    while True:
        states = hosts[0].run(["sinfo", "--noheader", "--Node", "--format=%N %t"]).stdout.split("\n")
        if sum(state.endswith(" idle") for state in states) == len(hosts):
            return
        if time.monotonic() > deadline:
            logs = "\n".join(
                path.read_text()[-2000:] for host in hosts for path in host.path("/run").glob("slurm*.log")
            )
            raise TimeoutError(f"Slurm's nodes are not idle within {READY_S:.0f} s: {states}\n{logs}")
        time.sleep(0.1)
