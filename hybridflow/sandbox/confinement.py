"""Command line that confines a program, through bubblewrap, and the check that it does.

Under root, namespaces are made with root's privileges, and the program gets a random user id that nothing else has, so
that the kernel counts its processes alone. Any other user gets a user namespace, in which they are counted by
themselves since Linux 5.14.
"""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from engine3d.errors import UserError, first_line
from hybridflow.sandbox.config import SandboxSettings
from hybridflow.sandbox.program import DIRECTORY, ProgramLimits, SandboxProgram
from hybridflow.sandbox.seccomp import filter_program

INPUT = "/input"
"""File that is the program's standard input."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_LOADER = ("/etc/ld.so.cache", "/etc/alternatives")
_SHARED_MEMORY_MB = 16
_OPEN_FILES = 256
_COUNTED_PER_NAMESPACE = (5, 14)
_QUESTION_S = 60.0
_LEAST_IDS = 1 << 16
"""Ids of a container. Root of a user namespace with fewer is as any other user."""

_ENVIRONMENT = {
    "LANG": "C.UTF-8",
    # Libraries start a thread for each core otherwise, more than a program may have.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

# Standard input is a pipe to the sandbox at first: a line in it says that all is set up. dash has -p where bash has -u.
# A limit cannot be set where a lower one is in force.
_SHELL = """
exec 3>&2 2>/dev/null
[ "$1" = - ] || ulimit -u "$1" || ulimit -p "$1"
ulimit -d "$2"
ulimit -f "$3"
ulimit -n "$4"
ulimit -c 0
echo 1000 > /proc/self/oom_score_adj
input=$5
shift 5
echo started >&0 || exit 1
exec "$@" < "$input" 2>&3 3>&-
"""


def shell_command(
    limits: ProgramLimits, command: Sequence[str], *, processes: int | None, stdin: str = INPUT
) -> list[str]:
    """Command that sets the limits of resources, writes a line to its standard input, and becomes the program.

    Args:
        limits: of the program.
        command: the program.
        processes: most processes with its user id that the kernel allows. None for no limit of the kernel's.
        stdin: path of its standard input.
    """
    data_kb, blocks = int(limits.memory_mb * 1e6 / 1024), int(limits.files_mb * 1e6 / 512) + 1
    numbers = ("-" if processes is None else processes, data_kb, blocks, _OPEN_FILES)
    return ["/bin/sh", "-c", _SHELL, "sh", *map(str, numbers), stdin, *command]


def words_of(program: SandboxProgram, python: Path) -> list[str]:
    """The command of a program, with the path of its interpreter."""
    first, *others = program.command
    return [str(python) if first == "python3" else first, *others]


def environment_of(python: Path, directory: str = DIRECTORY) -> dict[str, str]:
    """The environment of a program."""
    return {
        **_ENVIRONMENT,
        "HOME": directory,
        "TMPDIR": directory,
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
    }


@dataclass(frozen=True)
class Confinement:
    """Means of this machine to confine programs.

    Args:
        bubblewrap: path of `bwrap`.
        python: interpreter of programs.
        readable: directories and files that programs may read, next to those of the system.
        by_root: true if namespaces are made with root's privileges, false if within a user namespace.
        filter: of system calls.
    """

    bubblewrap: str
    python: Path
    readable: tuple[Path, ...]
    by_root: bool
    filter: bytes = field(repr=False)

    def __str__(self) -> str:
        means = "namespaces made by root, a user id for each program" if self.by_root else "user namespaces"
        return f"bubblewrap, {means}, seccomp, limits of resources"

    def command(
        self, program: SandboxProgram, limits: ProgramLimits, descriptors: Mapping[str, int], filter_descriptor: int
    ) -> list[str]:
        """The command line of a program.

        Args:
            program: to run.
            limits: of it.
            descriptors: of the contents of its files, by path, and of `INPUT`.
            filter_descriptor: of `filter`.
        """
        size = str(int(limits.files_mb * 1e6))
        line = [self.bubblewrap, *self._namespaces(), "--die-with-parent", "--new-session"]
        line += ["--ro-bind", "/usr", "/usr"]
        # Before what programs may read, which can be below it.
        line += ["--perms", "0777", "--size", size, "--tmpfs", DIRECTORY]
        line += [*self._system(), "--proc", "/proc", "--dev", "/dev"]
        line += [
            "--perms",
            "1777",
            "--size",
            str(_SHARED_MEMORY_MB << 20),
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        ]
        line += _parents([DIRECTORY + "/" + name for name in program.files], below=DIRECTORY, permissions="0777")
        for name, descriptor in descriptors.items():
            path, permissions = (name, "0444") if name == INPUT else (f"{DIRECTORY}/{name}", "0666")
            line += ["--perms", permissions, "--file", str(descriptor), path]
        line += ["--remount-ro", "/", "--chdir", DIRECTORY, "--seccomp", str(filter_descriptor), "--clearenv"]
        for name, value in environment_of(self.python).items():
            line += ["--setenv", name, value]
        # The first process of the namespace has the program's user id unless root made it.
        processes = limits.processes + (0 if self.by_root else 1)
        command = words_of(program, self.python)
        return [*line, "--", *self._identity(), *shell_command(limits, command, processes=processes)]

    def _namespaces(self) -> list[str]:
        line = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if not self.by_root:
            return ["--unshare-user", *line]
        kept = [word for name in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{name}")]
        return [*line, "--cap-drop", "ALL", *kept]

    def _identity(self) -> list[str]:
        """Words before the command under which it has another user id, and no privileges."""
        if not self.by_root:
            return []
        number = _unused_id()
        return [
            *("/usr/bin/setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"),
            *("--bounding-set=-all", "--inh-caps=-all", "--"),
        ]

    def _system(self) -> list[str]:
        line: list[str] = []
        for name in _SYSTEM:
            if Path(name).is_symlink():
                line += ["--symlink", str(Path(name).readlink()), name]
            elif Path(name).is_dir():
                line += ["--ro-bind", name, name]
        others = [path for path in self.readable if not path.is_relative_to("/usr")]
        line += _parents([*_LOADER, *map(str, others)], below="/", permissions="0755")
        for name in (*_LOADER, *map(str, others)):
            line += ["--ro-bind-try", name, name]
        return line

    def probe(self) -> SandboxProgram:
        """A program that prints a line for each thing that is not as it should be."""
        roots = {path.parts[1] for path in self.readable} | {PurePosixPath(name).parts[1] for name in _SYSTEM}
        known = sorted(roots | {"usr", "etc", "proc", "dev", DIRECTORY.strip("/"), INPUT.strip("/")})
        return SandboxProgram(("python3", "-c", _PROBE, json.dumps(known)), limits=ProgramLimits(timeout_s=60))


_PROBE = """
import json, os, sys
others = sorted(set(os.listdir("/")) - set(json.loads(sys.argv[1])))
if others:
    print(f"files of the machine are visible: {others}")
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
if interfaces not in ([], ["lo"]):
    print(f"the network is reachable: {interfaces}")
status = dict(line.rstrip().split(":", 1) for line in open("/proc/self/status"))
if status["Seccomp"].strip() != "2" or int(status["CapEff"], 16):
    print(f"seccomp {status['Seccomp'].strip()}, expected 2, privileges {status['CapEff'].strip()}, expected none")
if os.getppid() != 1:
    print("processes of the machine are visible")
"""


def find_confinement(settings: SandboxSettings) -> Confinement:
    """The means of this machine, by its programs and kernel. Whether they work, `Confinement.probe` says.

    Raises:
        UserError: one is missing. One line says which, and what would be right.
    """
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise unusable("the program bwrap is not installed (package bubblewrap)")
    by_root = os.geteuid() == 0 and _highest_id() >= _LEAST_IDS
    release = tuple(int(number) for number in re.findall(r"\d+", platform.release())[:2])
    if not by_root and release < _COUNTED_PER_NAMESPACE:
        raise unusable(f"Linux {platform.release()} counts processes of all user namespaces together, expected 5.14")
    try:
        filter_code = filter_program()
    except ValueError as error:
        raise unusable(str(error)) from None
    python, prefixes = find_python(settings)
    for path in settings.read_only:
        if not path.exists():
            raise UserError(f"sandbox.read_only: {path} does not exist")
    return Confinement(bubblewrap, python, (*prefixes, *settings.read_only), by_root, filter_code)


def unusable(reason: str) -> UserError:
    """The refusal to run programs without isolation."""
    return UserError(
        f"sandbox: {reason}; expected a machine that isolates programs, the url of a sandbox on another, or "
        "isolation: none, for programs that are trusted"
    )


def find_python(settings: SandboxSettings) -> tuple[Path, tuple[Path, ...]]:
    """Interpreter of programs, and the directories that it needs.

    Raises:
        UserError: the setting names none.
    """
    if settings.python is None:
        prefix, version = Path(sys.base_prefix), f"python{sys.version_info.major}.{sys.version_info.minor}"
        python = prefix / "bin" / version
        if not python.exists():
            raise UserError(f"sandbox: no interpreter at {python}; expected python: /path/to/python3")
        return python, (prefix,)
    question = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix]))"
    try:
        answer = subprocess.run(
            [settings.python, "-I", "-c", question], capture_output=True, check=True, timeout=_QUESTION_S
        )
        prefixes = tuple(Path(prefix) for prefix in dict.fromkeys(json.loads(answer.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UserError(f"sandbox.python: {settings.python} is no Python: {first_line(error)}") from None
    return settings.python, prefixes


def _parents(paths: Sequence[str], *, below: str, permissions: str) -> list[str]:
    """Words that make the directories of paths, since bubblewrap makes them for root alone."""
    directories = dict.fromkeys(
        str(parent) for path in paths for parent in reversed(PurePosixPath(path).parents) if str(parent) != below
    )
    below_it = [name for name in directories if PurePosixPath(name).is_relative_to(below)]
    return [word for name in below_it for word in ("--perms", permissions, "--dir", name)]


def _unused_id() -> int:
    """A user and group id that nothing else on this machine has, by chance: of the upper half of those there are."""
    most = _highest_id()
    return random.SystemRandom().randrange(most // 2, most - 2)


def _highest_id() -> int:
    """Number of ids that are both a user's and a group's in this user namespace."""
    numbers = [1 << 31]
    for path in ("/proc/self/uid_map", "/proc/self/gid_map"):
        lines = [tuple(map(int, line.split())) for line in Path(path).read_text().splitlines()]
        numbers.append(max(start + count for start, _, count in lines))
    return min(numbers)
