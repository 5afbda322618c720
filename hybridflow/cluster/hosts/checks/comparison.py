"""What is wrong with a set of hosts, from what each says of itself: a pure function of facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from engine3d.errors import amount
from hybridflow.cluster.devices.gpu_availability import IDLE_BYTES
from hybridflow.cluster.hosts.checks.facts import Gpu, HostFacts, Space
from hybridflow.cluster.hosts.description import Host, listed

Severity = Literal["refuse", "warn"]

CLOCK_WARN_S = 2.0
"""Times in logs and metrics of several hosts are no longer in order."""
CLOCK_REFUSE_S = 30.0
"""Times of files on a shared disk, and leases by the clock, are no longer to be trusted."""
PROCESS_BYTES = 10**9
"""Of a GPU's memory, that another process may hold: a display, a monitor."""
_TEMPORARY_BYTES = 10**9
_MUST_AGREE = ("hybridflow", "torch", "megatron-core", "transformer-engine", "sglang", "ray", "nvidia-nccl-cu13")
_SHOULD_AGREE = ("numpy", "safetensors")
_SAID_FIRST = 2
_SAID_OTHERS = 8
_MOST_VALUES = 4
_NOTHING = "none"
_BUSY = "GPUs in use by others"
_SHORT_HASH = 8


@dataclass(frozen=True, slots=True)
class ClockDifference:
    """A host's clock against that of host 0.

    Args:
        seconds: that it is ahead; negative where it is behind.
        uncertainty_s: half of the time that the question took.
    """

    seconds: float
    uncertainty_s: float

    @classmethod
    def measured(cls, asked_s: float, told_s: float, answered_s: float) -> ClockDifference:
        """Of a clock that was read between two readings of this host's.

        Args:
            asked_s: by this host's clock, before.
            told_s: by the other's.
            answered_s: by this host's, after.
        """
        return cls(told_s - (asked_s + answered_s) / 2, (answered_s - asked_s) / 2)

    @property
    def least_s(self) -> float:
        """That it is apart in any case."""
        return max(0.0, abs(self.seconds) - self.uncertainty_s)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of one host.

    Args:
        host: in the launch.
        facts: that it told.
        clock: against host 0's; None for host 0.
    """

    host: Host
    facts: HostFacts
    clock: ClockDifference | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of its hosts.

    Args:
        gpus: whether it uses any.
        shared_gpus: whether others may use them too, as `placement.shared_gpus`.
        run_dir_bytes: free, where the run's directory is.
        open_files: of each process.
        shared_memory_bytes: of /dev/shm.
        ports: that have to be free on every host; 0 where any port will do.
        locks_memory: whether the network's devices read memory by themselves (InfiniBand, RoCE, EFA).
    """

    gpus: bool = True
    shared_gpus: bool = False
    run_dir_bytes: int = 10**9
    open_files: int = 1024
    shared_memory_bytes: int = 512 * 2**20
    ports: int = 0
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
    """What comes of it.

    Args:
        findings: what is wrong, refusals first.
        table: in which columns hosts differ, as plain text; one line where they do not.
    """

    findings: tuple[Finding, ...]
    table: str

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """For which a run is not started."""
        return tuple(each for each in self.findings if each.severity == "refuse")

    @property
    def may_pass(self) -> bool:
        """Whether nothing is refused but GPUs in use, whose memory may belong to a run that has just ended."""
        return bool(self.refusals) and all(each.what == _BUSY for each in self.refusals)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """For which it is."""
        return tuple(each for each in self.findings if each.severity == "warn")


def compare(reports: Sequence[Report], needs: Needs | None = None) -> Comparison:
    """Compare hosts with each other and with what a run needs.

    Args:
        reports: of all hosts, host 0 first.
        needs: of the run.
    """
    hosts = _Hosts(reports)
    needs = needs or Needs()
    found = [
        *_software(hosts),
        *_clocks(hosts),
        *_limits(hosts, needs),
        *_directories(hosts, needs),
        *_networks(hosts, needs),
        *(_gpus(hosts, needs) if needs.gpus else ()),
    ]
    ordered = sorted(found, key=lambda finding: finding.severity != "refuse")
    return Comparison(tuple(ordered), _table(hosts))


@dataclass(frozen=True)
class _Hosts:
    """All hosts, each with a name that no other has."""

    reports: Sequence[Report]
    names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        told = [each.host.name for each in self.reports]
        names = {
            each.host.index: str(each.host) if told.count(each.host.name) > 1 else each.host.name
            for each in self.reports
        }
        object.__setattr__(self, "names", names)

    def name(self, report: Report) -> str:
        return self.names[report.host.index]

    def by[T](self, value: Callable[[Report], T]) -> dict[T, tuple[str, ...]]:
        """Names by value, the most frequent one first."""
        found: dict[T, list[str]] = {}
        for report in self.reports:
            found.setdefault(value(report), []).append(self.name(report))
        return {each: tuple(names) for each, names in sorted(found.items(), key=lambda each: -len(each[1]))}

    def differ(self, severity: Severity, what: str, value: Callable[[Report], str | None]) -> Iterator[Finding]:
        """A finding where those that know a value do not have the same."""
        known = {each: names for each, names in self.by(value).items() if each is not None}
        if len(known) > 1:
            yield Finding(severity, what, tuple((str(each), names) for each, names in known.items()))

    def lack(
        self, severity: Severity, what: str, value: Callable[[Report], str | None], expected: str
    ) -> Iterator[Finding]:
        """A finding where hosts have a value that is wrong by itself; None for one that is right."""
        wrong = {each: names for each, names in self.by(value).items() if each is not None}
        if wrong:
            yield Finding(severity, what, tuple((str(each), names) for each, names in wrong.items()), expected)


def _software(hosts: _Hosts) -> Iterator[Finding]:
    for name in _MUST_AGREE:
        yield from hosts.differ("refuse", name, _version(name))
    for name in _SHOULD_AGREE:
        yield from hosts.differ("warn", name, _version(name))
    minors = list(hosts.differ("refuse", "CPython", lambda each: _minor(each.facts.python)))
    yield from minors or hosts.differ("warn", "CPython", lambda each: each.facts.python or None)
    codes = {each.facts.code for each in hosts.reports} - {None}
    if len(codes) > 1:
        yield from hosts.differ("refuse", "code of hybridflow", _code)
    else:
        yield from hosts.differ("warn", "commit", lambda each: each.facts.commit and each.facts.commit[:_SHORT_HASH])
    yield from hosts.differ("refuse", "recipe", lambda each: each.facts.recipe and each.facts.recipe[:_SHORT_HASH])
    yield from hosts.differ("warn", "NVIDIA driver", lambda each: each.facts.driver)


def _version(name: str) -> Callable[[Report], str | None]:
    def version(report: Report) -> str | None:
        versions = report.facts.versions
        return (versions[name] or _NOTHING) if name in versions else None

    return version


def _minor(python: str) -> str | None:
    return ".".join(python.split(".")[:2]) or None


def _code(report: Report) -> str | None:
    """The text of the packages, called by the commit where that says all."""
    facts = report.facts
    if facts.code is None:
        return None
    text = f"text {facts.code[:_SHORT_HASH]}"
    if facts.commit is None:
        return text
    return f"commit {facts.commit[:_SHORT_HASH]}{' with changes' if facts.dirty else ''} ({text})"


def _clocks(hosts: _Hosts) -> Iterator[Finding]:
    def apart(least_s: float, most_s: float = float("inf")) -> Callable[[Report], str | None]:
        def value(report: Report) -> str | None:
            clock = report.clock
            if clock is None or not least_s < clock.least_s <= most_s:
                return None
            return f"{abs(clock.seconds):,.1f} s {'ahead of' if clock.seconds > 0 else 'behind'} host 0's"

        return value

    yield from hosts.lack("refuse", "clock", apart(CLOCK_REFUSE_S), f"at most {CLOCK_REFUSE_S:g} s apart (NTP)")
    little = apart(CLOCK_WARN_S, CLOCK_REFUSE_S)
    yield from hosts.lack("warn", "clock", little, f"at most {CLOCK_WARN_S:g} s apart (NTP)")


def _limits(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    def hard(name: str, least: float) -> Callable[[Report], str | None]:
        def value(report: Report) -> str | None:
            limit = report.facts.limits.get(name)
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
    def room(value: Callable[[HostFacts], Space | None], least: int) -> Callable[[Report], str | None]:
        def lacking(report: Report) -> str | None:
            space = value(report.facts)
            return None if space is None or space.free_bytes >= least else f"{amount(space.free_bytes, 1)} free"

        return lacking

    def small(report: Report) -> str | None:
        space = report.facts.shared_memory
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
        room(lambda facts: facts.run_dir_space, needs.run_dir_bytes),
        f"at least {amount(needs.run_dir_bytes, 1)}",
    )
    head = hosts.reports[0].facts
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
        room(lambda facts: facts.temporary, _TEMPORARY_BYTES),
        f"at least {amount(_TEMPORARY_BYTES, 1)} (TMPDIR names another)",
    )


def _unshared(report: Report) -> str | None:
    facts = report.facts
    if facts.sees_mark is not False:
        return None
    return f"another directory at {facts.run_dir}" + (
        f" ({facts.run_dir_file_system})" if facts.run_dir_file_system else ""
    )


def _networks(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    def unknown(report: Report) -> str | None:
        names = sorted(name for name, addresses in report.facts.resolved.items() if not addresses)
        return f"{', '.join(names)} not resolved" if names else None

    def taken(report: Report) -> str | None:
        free = report.facts.free_ports
        return None if free is None or free >= needs.ports else f"{free} free"

    known = "every host to know its own name and host 0's (/etc/hosts, DNS)"
    yield from hosts.lack("warn", "host names", unknown, known)
    if len(hosts.reports) > 1:
        yield from hosts.lack(
            "refuse",
            "C compiler",
            lambda report: None if report.facts.compiler else "none",
            "cc, gcc or clang: what has Ray listen at the cluster's address alone is compiled when a launch begins",
        )
    if needs.ports:
        yield from hosts.lack("refuse", "network.ports", taken, f"at least {needs.ports}")


def _gpus(hosts: _Hosts, needs: Needs) -> Iterator[Finding]:
    roles = sorted({each.host.role or "" for each in hosts.reports})
    for role in roles:
        inside = _Hosts([each for each in hosts.reports if (each.host.role or "") == role])
        of = f" of role {role}" if role else ""
        yield from inside.differ("refuse", f"GPUs{of}", lambda each: _kinds(each.facts.gpus))
        yield from inside.differ("warn", f"number of GPUs{of}", lambda each: str(len(each.facts.gpus)))
    busy = [(hosts.name(each), said) for each in hosts.reports for gpu in each.facts.gpus if (said := _in_use(gpu))]
    if busy:
        values = tuple((said, (name,)) for name, said in busy)
        severity: Severity = "warn" if needs.shared_gpus else "refuse"
        yield Finding(severity, _BUSY, values, "them free, or placement.shared_gpus=true")


def _kinds(gpus: Iterable[Gpu]) -> str | None:
    """Kinds of GPUs, without their number; None where there is none."""
    kinds = {f"{gpu.name} of {amount(gpu.total_bytes, 1)}" if gpu.total_bytes else gpu.name for gpu in gpus}
    return " and ".join(sorted(kinds)) or None


def _in_use(gpu: Gpu) -> str | None:
    """Who uses a GPU, where somebody does."""
    large = [each for each in gpu.processes if (each.used_bytes or 0) > PROCESS_BYTES]
    if large:
        said = [
            f"pid {each.pid}{f' {each.name}' if each.name else ''} {amount(each.used_bytes or 0, 1)}" for each in large
        ]
        return f"GPU {gpu.index} ({listed(said)})"
    # Where the driver does not say who, as inside a container, it still says how much.
    unexplained = gpu.used_bytes - sum(each.used_bytes or 0 for each in gpu.processes)
    return f"GPU {gpu.index} ({amount(gpu.used_bytes, 1)})" if unexplained > IDLE_BYTES else None


def _told_version(name: str) -> Callable[[Report], str]:
    return lambda each: each.facts.versions.get(name) or _NOTHING


_COLUMNS: dict[str, Callable[[Report], str]] = {
    "role": lambda each: each.host.role or "any",
    **{name: _told_version(name) for name in (*_MUST_AGREE, *_SHOULD_AGREE)},
    "CPython": lambda each: each.facts.python or "?",
    "kernel": lambda each: each.facts.kernel or "?",
    "code": lambda each: (each.facts.code or "?")[:_SHORT_HASH],
    "commit": lambda each: (each.facts.commit or "?")[:_SHORT_HASH] + ("*" if each.facts.dirty else ""),
    "recipe": lambda each: (each.facts.recipe or "?")[:_SHORT_HASH],
    "driver": lambda each: each.facts.driver or _NOTHING,
    "CUDA": lambda each: each.facts.cuda or _NOTHING,
    "GPUs": lambda each: f"{len(each.facts.gpus)} x {_kinds(each.facts.gpus)}" if each.facts.gpus else _NOTHING,
    "cores": lambda each: str(each.facts.cores),
    "memory": lambda each: _rounded(each.facts.memory_bytes),
    "/dev/shm": lambda each: _total(each.facts.shared_memory),
    "run_dir": lambda each: _shared(each.facts),
    "open files": lambda each: _hard(each.facts, "open_files"),
    "locked memory": lambda each: _hard(each.facts, "locked_memory"),
    "processes": lambda each: _hard(each.facts, "processes"),
    "clock": lambda each: _clock(each.clock),
}
"""Of the table, by title. What differs a little on every host, such as free memory, is in none."""


def _table(hosts: _Hosts) -> str:
    """Hosts in rows, those alike in one; only the columns in which some differ."""
    count = len(hosts.reports)
    differing = {title: of for title, of in _COLUMNS.items() if len(hosts.by(of)) > 1}
    alike = len(_COLUMNS) - len(differing)
    if not differing:
        one = hosts.reports[0]
        said = ", ".join(f"{title} {_COLUMNS[title](one)}" for title in ("torch", "GPUs", "cores", "memory"))
        return f"{_hosts(count)} alike in all {alike} facts: {said}"
    rows = hosts.by(lambda each: tuple(of(each) for of in differing.values()))
    lines = [("hosts", *differing), *((ranges(names), *values) for values, names in rows.items())]
    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, f"{_hosts(count)} alike in {alike} of {len(_COLUMNS)} facts"])


def ranges(names: Iterable[str]) -> str:
    """Names of hosts, those that follow each other shortened: "host-[0-5,8], login"."""
    found: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
        before, digits, after = match.groups() if match else (name, "", "")
        found.setdefault((before, after), []).append((int(digits) if digits else -1, digits))
    said = []
    for (before, after), numbers in found.items():
        runs = [list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda each: each[1][0] - each[0])]
        spans = [_span(run[0][1][1], run[-1][1][1]) for run in runs]
        whole = len(numbers) == 1
        said.append(f"{before}{spans[0]}{after}" if whole else f"{before}[{','.join(spans)}]{after}")
    return ", ".join(said)


def _span(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


def _shared(facts: HostFacts) -> str:
    """Which directory `run_dir` is."""
    kind = facts.run_dir_file_system or "?"
    return f"{kind}, another" if facts.sees_mark is False else kind


def _hard(facts: HostFacts, name: str) -> str:
    limit = facts.limits.get(name)
    return "?" if limit is None else "unlimited" if limit.hard is None else str(limit.hard)


def _clock(clock: ClockDifference | None) -> str:
    """What a clock is apart, where that is too much."""
    return f"{clock.seconds:+.1f} s" if clock is not None and clock.least_s > CLOCK_WARN_S else "right"


def _total(space: Space | None) -> str:
    return "?" if space is None else _rounded(space.total_bytes)


def _rounded(nbytes: int) -> str:
    """Two digits, so that hosts of one kind agree."""
    return f"{float(f'{nbytes / 1e9:.2g}'):,g} GB"
