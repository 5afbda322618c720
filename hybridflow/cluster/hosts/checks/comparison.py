"""Comparison of hosts: refusals and warnings as a pure function of their facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from engine3d.errors import amount
from hybridflow.cluster.devices.gpu_availability import IDLE_BYTES
from hybridflow.cluster.hosts.checks.facts import MUST_AGREE, SHOULD_AGREE, ClockDifference, Gpu, HostFacts, Space
from hybridflow.cluster.hosts.description import listed

Severity = Literal["refuse", "warn"]

CLOCK_WARN_S = 2.0
"""Times in logs and metrics of several hosts are no longer in order."""
CLOCK_REFUSE_S = 30.0
"""Times of files on a shared disk, and leases by the clock, are no longer to be trusted."""
PROCESS_BYTES = 10**9
"""Memory of a GPU that another process may hold: a display, a monitor."""
_TEMPORARY_BYTES = 10**9
_SAID_FIRST = 2
_SAID_OTHERS = 8
_MOST_VALUES = 4
_NOTHING = "none"
_BUSY = "GPUs in use by others"
_SHORT_HASH = 8


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a run on its hosts.

    Args:
        gpus: whether it uses any.
        shared_gpus: whether others may use them too, as `placement.shared_gpus`.
        run_dir_bytes: free, where the run's directory is.
        open_files: of each process.
        shared_memory_bytes: of /dev/shm.
        locks_memory: whether the network's devices read memory by themselves (InfiniBand, RoCE, EFA).
    """

    gpus: bool = True
    shared_gpus: bool = False
    run_dir_bytes: int = 10**9
    open_files: int = 1024
    shared_memory_bytes: int = 512 * 2**20
    locks_memory: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Args:
        severity: whether a run is refused for it.
        what: differs or is missing, such as "torch".
        values: each value with the names of the hosts that have it, the most frequent one first where hosts differ.
        expected: instead; empty where hosts are expected to agree.
    """

    severity: Severity
    what: str
    values: tuple[tuple[str, tuple[str, ...]], ...]
    expected: str = ""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts with which something is wrong: of those that differ, all but the most."""
        wrong = self.values if self.expected else self.values[1:]
        return tuple(name for _, names in wrong for name in names)

    def __str__(self) -> str:
        said = []
        for number, (value, names) in enumerate(self.values[:_MOST_VALUES]):
            most = _SAID_FIRST if number == 0 and not self.expected else _SAID_OTHERS
            said.append(f"{value} on {listed(names, most)}")
        if len(self.values) > _MOST_VALUES:
            said.append(f"{len(self.values) - _MOST_VALUES} more values")
        return f"{self.what}: {'; '.join(said)}" + (f"; expected {self.expected}" if self.expected else "")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison.

    Args:
        findings: what is wrong, refusals first.
        table: in which columns hosts differ, as plain text; one line where they do not.
    """

    findings: tuple[Finding, ...]
    table: str

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """Findings for which a run is not started."""
        return tuple(finding for finding in self.findings if finding.severity == "refuse")

    @property
    def may_pass(self) -> bool:
        """True if nothing is refused but GPUs in use, whose memory may belong to a run that has just ended."""
        return bool(self.refusals) and all(refusal.what == _BUSY for refusal in self.refusals)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings for which it is started."""
        return tuple(finding for finding in self.findings if finding.severity == "warn")


def compare(facts: Sequence[HostFacts], needs: Needs | None = None) -> Comparison:
    """Compare hosts with each other and with what a run needs.

    Args:
        facts: of all hosts, host 0 first.
        needs: of the run.
    """
    hosts = _Hosts(facts)
    needs = needs or Needs()
    findings = [
        *_software(hosts),
        *_clocks(hosts),
        *_limits(hosts, needs),
        *_directories(hosts, needs),
        *_names(hosts),
        *(_gpus(hosts, needs) if needs.gpus else ()),
    ]
    ordered = sorted(findings, key=lambda finding: finding.severity != "refuse")
    return Comparison(tuple(ordered), _table(hosts))


@dataclass(frozen=True)
class _Hosts:
    """All hosts, each with a name that no other has."""

    of_hosts: Sequence[HostFacts]
    names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        host_names = [facts.host.name for facts in self.of_hosts]
        names = {
            facts.host.index: str(facts.host) if host_names.count(facts.host.name) > 1 else facts.host.name
            for facts in self.of_hosts
        }
        object.__setattr__(self, "names", names)

    def name(self, facts: HostFacts) -> str:
        return self.names[facts.host.index]

    def by[T](self, value: Callable[[HostFacts], T]) -> dict[T, tuple[str, ...]]:
        """Names by value, the most frequent one first."""
        names: dict[T, list[str]] = {}
        for facts in self.of_hosts:
            names.setdefault(value(facts), []).append(self.name(facts))
        return {key: tuple(names[key]) for key in sorted(names, key=lambda key: -len(names[key]))}

    def differ(self, severity: Severity, what: str, value: Callable[[HostFacts], str | None]) -> Iterator[Finding]:
        """A finding where those that know a value do not have the same."""
        known = {distinct: names for distinct, names in self.by(value).items() if distinct is not None}
        if len(known) > 1:
            yield Finding(severity, what, tuple((str(distinct), names) for distinct, names in known.items()))

    def lack(
        self, severity: Severity, what: str, value: Callable[[HostFacts], str | None], expected: str
    ) -> Iterator[Finding]:
        """A finding where hosts have a value that is wrong by itself; None for one that is right."""
        wrong = {distinct: names for distinct, names in self.by(value).items() if distinct is not None}
        if wrong:
            yield Finding(severity, what, tuple((str(distinct), names) for distinct, names in wrong.items()), expected)


def _software(hosts: _Hosts) -> Iterator[Finding]:
    for name in MUST_AGREE:
        yield from hosts.differ("refuse", name, _version(name))
    for name in SHOULD_AGREE:
        yield from hosts.differ("warn", name, _version(name))
    minors = list(hosts.differ("refuse", "CPython", lambda facts: _minor(facts.python)))
    yield from minors or hosts.differ("warn", "CPython", lambda facts: facts.python or None)
    codes = {facts.code for facts in hosts.of_hosts} - {None}
    if len(codes) > 1:
        yield from hosts.differ("refuse", "code of hybridflow", _code)
    else:
        yield from hosts.differ("warn", "commit", lambda facts: facts.commit and facts.commit[:_SHORT_HASH])
    yield from hosts.differ("warn", "NVIDIA driver", lambda facts: facts.driver)


def _version(name: str) -> Callable[[HostFacts], str | None]:
    def version(facts: HostFacts) -> str | None:
        versions = facts.versions
        return (versions[name] or _NOTHING) if name in versions else None

    return version


def _minor(python: str) -> str | None:
    return ".".join(python.split(".")[:2]) or None


def _code(facts: HostFacts) -> str | None:
    """The text of the packages, called by the commit where that says all."""
    if facts.code is None:
        return None
    text = f"text {facts.code[:_SHORT_HASH]}"
    if facts.commit is None:
        return text
    return f"commit {facts.commit[:_SHORT_HASH]}{' with changes' if facts.dirty else ''} ({text})"


def _clocks(hosts: _Hosts) -> Iterator[Finding]:
    def apart(least_s: float, most_s: float = float("inf")) -> Callable[[HostFacts], str | None]:
        def value(facts: HostFacts) -> str | None:
            clock = facts.clock
            if clock is None or not least_s < clock.least_s <= most_s:
                return None
            return f"{abs(clock.seconds):,.1f} s {'ahead of' if clock.seconds > 0 else 'behind'} host 0's"

        return value

    yield from hosts.lack("refuse", "clock", apart(CLOCK_REFUSE_S), f"at most {CLOCK_REFUSE_S:g} s apart (NTP)")
    little = apart(CLOCK_WARN_S, CLOCK_REFUSE_S)
    yield from hosts.lack("warn", "clock", little, f"at most {CLOCK_WARN_S:g} s apart (NTP)")


def _limits(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    def hard(name: str, least: float) -> Callable[[HostFacts], str | None]:
        def value(facts: HostFacts) -> str | None:
            limit = facts.limits.get(name)
            return None if limit is None or limit.hard is None or limit.hard >= least else f"{limit.hard:,}"

        return value

    yield from hosts.lack(
        "refuse", "open files", hard("open_files", needs.open_files), f"at least {needs.open_files:,} (ulimit -Hn)"
    )
    if needs.locks_memory:
        yield from hosts.lack(
            "warn",
            "locked memory",
            hard("locked_memory", float("inf")),
            "unlimited (ulimit -Hl): the network's devices read memory that is locked",
        )


def _directories(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    def space_below(value: Callable[[HostFacts], Space | None], least: int) -> Callable[[HostFacts], str | None]:
        def lacking(facts: HostFacts) -> str | None:
            space = value(facts)
            return None if space is None or space.free_bytes >= least else f"{amount(space.free_bytes, 1)} free"

        return lacking

    def small(facts: HostFacts) -> str | None:
        space = facts.shared_memory
        return None if space is None or space.total_bytes >= needs.shared_memory_bytes else amount(space.total_bytes, 1)

    yield from hosts.lack(
        "refuse",
        "/dev/shm",
        small,
        f"at least {amount(needs.shared_memory_bytes, 1)} (docker run --shm-size, or mount -o remount,size=)",
    )
    yield from hosts.lack(
        "refuse",
        "run_dir",
        space_below(lambda facts: facts.run_dir_space, needs.run_dir_bytes),
        f"at least {amount(needs.run_dir_bytes, 1)}",
    )
    head = hosts.of_hosts[0]
    theirs = f" (host 0 has {head.run_dir_file_system})" if head.run_dir_file_system else ""
    yield from hosts.lack(
        "warn",
        "run_dir",
        _unshared,
        f"the directory that host 0 sees at {head.run_dir}{theirs}; without it logs are sent to host 0, and "
        "checkpoints, exports and models that the run makes need another place",
    )
    yield from hosts.lack(
        "warn",
        "temporary directory",
        space_below(lambda facts: facts.temporary, _TEMPORARY_BYTES),
        f"at least {amount(_TEMPORARY_BYTES, 1)} (TMPDIR names another)",
    )


def _unshared(facts: HostFacts) -> str | None:
    if facts.sees_mark is not False:
        return None
    return f"another directory at {facts.run_dir}" + (
        f" ({facts.run_dir_file_system})" if facts.run_dir_file_system else ""
    )


def _names(hosts: _Hosts) -> Iterator[Finding]:
    def unknown(facts: HostFacts) -> str | None:
        names = sorted(name for name, addresses in facts.resolved.items() if not addresses)
        return f"{', '.join(names)} not resolved" if names else None

    known = "every host to know its own name and host 0's (/etc/hosts, DNS)"
    yield from hosts.lack("warn", "host names", unknown, known)


def _gpus(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    roles = sorted({facts.host.role or "" for facts in hosts.of_hosts})
    for role in roles:
        inside = _Hosts([facts for facts in hosts.of_hosts if (facts.host.role or "") == role])
        of = f" of role {role}" if role else ""
        yield from inside.differ("refuse", f"GPUs{of}", lambda facts: _kinds(facts.gpus))
        yield from inside.differ("warn", f"number of GPUs{of}", lambda facts: str(len(facts.gpus)))
    busy = [(hosts.name(facts), said) for facts in hosts.of_hosts for gpu in facts.gpus if (said := _in_use(gpu))]
    if busy:
        values = tuple((said, (name,)) for name, said in busy)
        severity: Severity = "warn" if needs.shared_gpus else "refuse"
        yield Finding(severity, _BUSY, values, "them free, or placement.shared_gpus=true")


def _kinds(gpus: Iterable[Gpu]) -> str | None:
    """Kinds of GPUs, without their number; None where there is none."""
    kinds = {f"{gpu.name} of {amount(gpu.total_bytes, 1)}" if gpu.total_bytes else gpu.name for gpu in gpus}
    return " and ".join(sorted(kinds)) or None


def _in_use(gpu: Gpu) -> str | None:
    """Users of a GPU; None if there are none."""
    large = [process for process in gpu.processes if (process.used_bytes or 0) > PROCESS_BYTES]
    if large:
        said = [
            f"pid {process.pid}{f' {process.name}' if process.name else ''} {amount(process.used_bytes or 0, 1)}"
            for process in large
        ]
        return f"GPU {gpu.index} ({listed(said)})"
    # Where the driver does not say who, as inside a container, it still says how much.
    unexplained = gpu.used_bytes - sum(process.used_bytes or 0 for process in gpu.processes)
    return f"GPU {gpu.index} ({amount(gpu.used_bytes, 1)})" if unexplained > IDLE_BYTES else None


def _told_version(name: str) -> Callable[[HostFacts], str]:
    return lambda facts: facts.versions.get(name) or _NOTHING


_COLUMNS: dict[str, Callable[[HostFacts], str]] = {
    "role": lambda facts: facts.host.role or "any",
    **{name: _told_version(name) for name in (*MUST_AGREE, *SHOULD_AGREE)},
    "CPython": lambda facts: facts.python or "?",
    "kernel": lambda facts: facts.kernel or "?",
    "code": lambda facts: (facts.code or "?")[:_SHORT_HASH],
    "commit": lambda facts: (facts.commit or "?")[:_SHORT_HASH] + ("*" if facts.dirty else ""),
    "driver": lambda facts: facts.driver or _NOTHING,
    "CUDA": lambda facts: facts.cuda or _NOTHING,
    "GPUs": lambda facts: f"{len(facts.gpus)} x {_kinds(facts.gpus)}" if facts.gpus else _NOTHING,
    "cores": lambda facts: str(facts.cores),
    "memory": lambda facts: _rounded(facts.memory_bytes),
    "/dev/shm": lambda facts: _total(facts.shared_memory),
    "run_dir": lambda facts: _shared(facts),
    "open files": lambda facts: _hard(facts, "open_files"),
    "locked memory": lambda facts: _hard(facts, "locked_memory"),
    "processes": lambda facts: _hard(facts, "processes"),
    "clock": lambda facts: _clock(facts.clock),
}
"""Columns of the table, by title. A value that differs a little on every host, such as free memory, is in none."""


def _table(hosts: _Hosts) -> str:
    """Hosts in rows, those alike in one; only the columns in which some differ."""
    count = len(hosts.of_hosts)
    differing = {title: of for title, of in _COLUMNS.items() if len(hosts.by(of)) > 1}
    alike = len(_COLUMNS) - len(differing)
    if not differing:
        one = hosts.of_hosts[0]
        said = ", ".join(f"{title} {_COLUMNS[title](one)}" for title in ("torch", "GPUs", "cores", "memory"))
        return f"{_hosts(count)} alike in all {alike} facts: {said}"
    rows = hosts.by(lambda facts: tuple(of(facts) for of in differing.values()))
    lines = [("hosts", *differing), *((ranges(names), *values) for values, names in rows.items())]
    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, f"{_hosts(count)} alike in {alike} of {len(_COLUMNS)} facts"])


def ranges(names: Iterable[str]) -> str:
    """Names of hosts, those that follow each other shortened: "host-[0-5,8], login"."""
    findings: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
        before, digits, after = match.groups() if match else (name, "", "")
        findings.setdefault((before, after), []).append((int(digits) if digits else -1, digits))
    said = []
    for (before, after), numbers in findings.items():
        runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1][0] - pair[0])]
        spans = [_span(run[0][1][1], run[-1][1][1]) for run in runs]
        is_single = len(numbers) == 1
        said.append(f"{before}{spans[0]}{after}" if is_single else f"{before}[{','.join(spans)}]{after}")
    return ", ".join(said)


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


def _shared(facts: HostFacts) -> str:
    """Directory at `run_dir`."""
    kind = facts.run_dir_file_system or "?"
    return f"{kind}, another" if facts.sees_mark is False else kind


def _hard(facts: HostFacts, name: str) -> str:
    limit = facts.limits.get(name)
    return "?" if limit is None else "unlimited" if limit.hard is None else str(limit.hard)


def _clock(clock: ClockDifference | None) -> str:
    """Difference of a clock, if it is too large."""
    return f"{clock.seconds:+.1f} s" if clock is not None and clock.least_s > CLOCK_WARN_S else "right"


def _total(space: Space | None) -> str:
    return "?" if space is None else _rounded(space.total_bytes)


def _rounded(nbytes: int) -> str:
    """Two digits, so that hosts of one kind agree."""
    return f"{float(f'{nbytes / 1e9:.2g}'):,g} GB"
