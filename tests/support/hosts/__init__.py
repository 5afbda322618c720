"""Real hosts on one machine, made of Linux namespaces: for tests of launching on several hosts, and of their failures.

    with make_hosts(3, shared=tmp_path) as hosts:
        hosts[1].run(["ping", "-c1", "host-2"], timeout_s=10, check=True)
        process = hosts[1].start([sys.executable, "-m", "hybridflow", ...], stdout=file)
        hosts[2].link_down()
        hosts[1].power_off()

Programs with a process that leaves nothing on a host: `processes()`, `left_files()`, `sockets()` are empty.
"""

from tests.support.hosts.cluster import Hosts, hosts_or_skip, make_hosts
from tests.support.hosts.host import Host, HostProcess
from tests.support.hosts.namespaces import HostsUnavailable

__all__ = ["Host", "HostProcess", "Hosts", "HostsUnavailable", "hosts_or_skip", "make_hosts"]
