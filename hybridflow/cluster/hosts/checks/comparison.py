"""Comparison of hosts: refusals and warnings as a pure function of their facts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hybridflow.cluster.hosts.checks.facts import DISTRIBUTIONS, MUST_AGREE, NOTHING, HostFacts, Lack, Severity
from hybridflow.cluster.hosts.description import listed

CLOCK_WARN_S = 2.0
"""Times in logs and metrics of several hosts are no longer in order."""
CLOCK_REFUSE_S = 30.0
"""Times of files on a shared disk, and leases by the clock, are no longer to be trusted."""
_SAID_FIRST = 2
_SAID_OTHERS = 8
_MOST_VALUES = 4
_SHORT_HASH = 8

Value = Callable[[HostFacts], str | None]
"""A value of a host. None if it is not known or not wrong."""


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
    def warnings(self) -> tuple[Finding, ...]:
        """Findings for which it is started."""
        return tuple(finding for finding in self.findings if finding.severity == "warn")


def compare(reports: Sequence[HostFacts], *, gpus: bool = True) -> Comparison:
    """Compare hosts with each other, and say what is wrong on each.

    Args:
        reports: of all hosts, host 0 first.
        gpus: whether the run uses any.
    """
    hosts = _Hosts(reports)
    findings = [*_software(hosts), *hosts.lacks(), *(_gpus(reports) if gpus else ())]
    return Comparison(tuple(sorted(findings, key=lambda finding: finding.severity != "refuse")), _table(hosts))


def by_value[T](pairs: Iterable[tuple[T, str]]) -> dict[T, tuple[str, ...]]:
    """Names of hosts by the value that each has, the most frequent one first."""
    names: dict[T, list[str]] = {}
    for value, name in pairs:
        names.setdefault(value, []).append(name)
    return {key: tuple(names[key]) for key in sorted(names, key=lambda key: -len(names[key]))}


class _Hosts:
    """All hosts, each with a name that no other has."""

    def __init__(self, reports: Sequence[HostFacts]) -> None:
        self.reports = reports
        count = Counter(of_one.host.name for of_one in reports)
        self._names = [str(of_one.host) if count[of_one.host.name] > 1 else of_one.host.name for of_one in reports]

    def by[T](self, value: Callable[[HostFacts], T]) -> dict[T, tuple[str, ...]]:
        """Names by value, the most frequent one first."""
        return by_value(zip(map(value, self.reports), self._names, strict=True))

    def differ(self, severity: Severity, what: str, value: Value) -> Iterator[Finding]:
        """A finding where those that know a value do not have the same."""
        known = tuple((distinct, names) for distinct, names in self.by(value).items() if distinct is not None)
        if len(known) > 1:
            yield Finding(severity, what, known)

    def lacks(self) -> Iterator[Finding]:
        """A finding for each thing that is wrong on hosts by itself."""
        values_of: dict[tuple[Severity, str, str], dict[str, list[str]]] = {}
        for of_one, name in zip(self.reports, self._names, strict=True):
            for lack in (*_clock(of_one), *of_one.lacks, *_run_dir(of_one, self.reports[0])):
                values = values_of.setdefault((lack.severity, lack.what, lack.expected), {})
                values.setdefault(lack.value, []).append(name)
        for (severity, what, expected), values in values_of.items():
            yield Finding(severity, what, tuple((value, tuple(names)) for value, names in values.items()), expected)


def _value(title: str, length: int | None = None) -> Value:
    """The value of a column, or its beginning."""

    def value(report: HostFacts) -> str | None:
        known = report.values.get(title)
        return None if known is None else known[:length]

    return value


def _software(hosts: _Hosts) -> Iterator[Finding]:
    for name in DISTRIBUTIONS:
        yield from hosts.differ("refuse" if name in MUST_AGREE else "warn", name, _value(name))
    minors = list(hosts.differ("refuse", "CPython", _minor))
    yield from minors or hosts.differ("warn", "CPython", _value("CPython"))
    texts = list(hosts.differ("refuse", "code of hybridflow", _code))
    same_text = len({report.values.get("code") for report in hosts.reports} - {None}) <= 1
    yield from hosts.differ("warn", "commit", _value("commit", _SHORT_HASH)) if same_text else texts
    yield from hosts.differ("warn", "NVIDIA driver", _value("driver"))


def _minor(report: HostFacts) -> str | None:
    version = report.values.get("CPython")
    return None if version is None else ".".join(version.split(".")[:2])


def _code(report: HostFacts) -> str | None:
    """The text of the packages, called by the commit where that says all."""
    code, commit = report.values.get("code"), report.values.get("commit")
    if code is None or commit is None:
        return code and f"text {code[:_SHORT_HASH]}"
    changes = " with changes" if commit.endswith("*") else ""
    return f"commit {commit[:_SHORT_HASH]}{changes} (text {code[:_SHORT_HASH]})"


def _clock(report: HostFacts) -> Iterator[Lack]:
    if (clock := report.clock) is not None and clock.least_s > CLOCK_WARN_S:
        severity: Severity = "refuse" if clock.least_s > CLOCK_REFUSE_S else "warn"
        most_s = CLOCK_REFUSE_S if severity == "refuse" else CLOCK_WARN_S
        value = f"{abs(clock.seconds):,.1f} s {'ahead of' if clock.seconds > 0 else 'behind'} host 0's"
        yield Lack(severity, "clock", value, f"at most {most_s:g} s apart (NTP)")


def _run_dir(report: HostFacts, head: HostFacts) -> Iterator[Lack]:
    if _is_apart(report):
        here, theirs = report.values.get("run_dir"), head.values.get("run_dir")
        value = f"another directory at {report.run_dir}{f' ({here})' if here else ''}"
        expected = (
            f"the directory that host 0 sees at {head.run_dir}{f' (host 0 has {theirs})' if theirs else ''}; without "
            "it logs are sent to host 0, and checkpoints, exports and models that the run makes need another place"
        )
        yield Lack("warn", "run_dir", value, expected)


def _is_apart(report: HostFacts) -> bool:
    return report.sees_mark is False


def _gpus(reports: Sequence[HostFacts]) -> Iterator[Finding]:
    for role in sorted({of_one.host.role or "" for of_one in reports}):
        inside = _Hosts([of_one for of_one in reports if (of_one.host.role or "") == role])
        of = f" of role {role}" if role else ""
        yield from inside.differ("refuse", f"GPUs{of}", lambda of_one: " and ".join(sorted(set(of_one.gpus))) or None)
        yield from inside.differ("warn", f"number of GPUs{of}", lambda of_one: str(len(of_one.gpus)))


def _row(report: HostFacts) -> dict[str, str]:
    """Values of a host as the table shows them, by title. One that differs a little on every host is in none."""
    shown = {title: NOTHING if value is None else value for title, value in report.values.items()}
    for title in ("code", "commit"):
        is_changed = shown.get(title, "").endswith("*")
        shown[title] = shown.get(title, NOTHING)[:_SHORT_HASH] + ("*" if is_changed else "")
    clock = report.clock
    shown["clock"] = f"{clock.seconds:+.1f} s" if clock is not None and clock.least_s > CLOCK_WARN_S else "right"
    shown["run_dir"] = f"{shown.get('run_dir', NOTHING)}{', another' if _is_apart(report) else ''}"
    return {"role": report.host.role or "any", **shown}


def _table(hosts: _Hosts) -> str:
    """Hosts in rows, those alike in one; only the columns in which some differ."""
    rows = {id(report): _row(report) for report in hosts.reports}
    titles = list(dict.fromkeys(title for row in rows.values() for title in row))
    differing = [title for title in titles if len({row.get(title) for row in rows.values()}) > 1]
    count = f"{len(rows)} host{'s' if len(rows) > 1 else ''}"
    alike = len(titles) - len(differing)
    if not differing:
        one = rows[id(hosts.reports[0])]
        said = ", ".join(f"{title} {one[title]}" for title in ("torch", "GPUs", "cores", "memory"))
        return f"{count} alike in all {alike} facts: {said}"
    by_row = hosts.by(lambda report: tuple(rows[id(report)].get(title, NOTHING) for title in differing))
    lines = [("hosts", *differing), *((ranges(names), *values) for values, names in by_row.items())]
    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*text, f"{count} alike in {alike} of {len(titles)} facts"])


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
