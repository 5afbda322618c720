"""The table of the hosts of a run and of what is in force of their network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from hybridflow.report.run_data import RunData
from hybridflow.rundir.hosts_file import RunHost

_COLUMNS = ("hosts", "interface", "role", "devices", "network")


def host_table(run: RunData) -> str:
    """Those together that differ in nothing but name and address, as HTML; empty where no launcher started the run."""
    if not run.hosts:
        return ""
    alike: dict[tuple[object, ...], list[RunHost]] = {}
    for host in run.hosts:
        kind = (host.interface, host.role, host.gpus, host.cpu_slots, host.settings, host.shares_disk)
        alike.setdefault(kind, []).append(host)
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "\n".join(map(_row, alike.values()))
    return (
        '<h2>Hosts</h2>\n<div class="samples"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n"
    )


def _row(hosts: Sequence[RunHost]) -> str:
    one = hosts[0]
    names = ", ".join(f"{host.name} ({host.address})" if host.name != host.address else host.name for host in hosts)
    names += "" if one.shares_disk else "; without the run's disk"
    devices = f"{one.gpus} GPUs each" if one.gpus else f"{one.cpu_slots} CPU slots each"
    network = "\n".join(f"{each.name}={each.value} ({each.origin})" for each in one.settings) or "nothing set"
    plain = "".join(f"<td>{escape(text)}</td>" for text in (one.interface or "", one.role or "any", devices))
    return f'<tr><td class="text">{escape(names)}</td>{plain}<td class="text">{escape(network)}</td></tr>'
