"""The order of packages, and no circles: every import counts, also under TYPE_CHECKING and within functions."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOPS = ("launch", "benchmarks", "hybridflow", "engine3d")

ORDERS = {
    "hybridflow": "cli > api > trainer > planning > checkpoint > config > roles | rollout > workers "
    "> algorithms | cluster | report > batch | metrics | environments > endpoint > rewards | data | rundir > sandbox "
    "> remote > errors",
    "engine3d": "checkpoint | memory | serving > training | rollout > reshard > models > platform > startup",
}
"""Packages of each top package, highest first: a package imports only those to its right, and none on its own level."""
LEVEL = {
    f"{top}.{package}": level
    for top, order in ORDERS.items()
    for level, line in enumerate(order.split(" > "))
    for package in line.split(" | ")
}

OUTSIDE = {"hybridflow": {"megatron", "sglang"}, "engine3d": {"ray"}, "hybridflow.algorithms": {"ray"}}
"""Libraries that no module of a package may import."""


@dataclass(frozen=True, order=True)
class Import:
    """Import of `imported`, a module of this project or the name of another library, by a module of this project."""

    module: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imported}"


def modules(root: Path) -> dict[str, Path]:
    """Every module of the repository's packages by its dotted name."""
    files = (path for top in TOPS for path in sorted((root / top).rglob("*.py")))
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imports(root: Path) -> list[Import]:
    """All imports of all modules."""
    known = modules(root)
    return [imported for module, path in known.items() for imported in _imports_of(module, path, known.keys())]


def _imports_of(module: str, path: Path, known: Iterable[str]) -> list[Import]:
    found_imports = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, path, node)
            inner = [f"{origin}.{alias.name}" for alias in node.names]
            names = [name if name in known else origin for name in inner]
        elif isinstance(node, ast.Call) and "import_module" in _called(node) and node.args:
            name = node.args[0]
            names = [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
        found_imports += [Import(module, name, node.lineno) for name in dict.fromkeys(names) if name != module]
    return found_imports


def _called(call: ast.Call) -> str:
    """Name of the function or method that is called, "" for that of another expression."""
    match call.func:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _origin(module: str, path: Path, node: ast.ImportFrom) -> str:
    """The absolute name of what a `from` names."""
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*package[: len(package) + 1 - node.level], *([node.module] if node.module else [])])


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def package_of(module: str) -> str:
    """The folder right below a top package that a module is in; "" for one that is in none."""
    names = module.split(".")
    return ".".join(names[:2]) if len(names) > 1 else ""


def upward(all_imports: Iterable[Import]) -> list[Import]:
    """The imports against the order of packages, where both are of one top package."""
    wrong = []
    for edge in all_imports:
        one, other = package_of(edge.module), package_of(edge.imported)
        if one != other and one.split(".")[0] == other.split(".")[0] and {one, other} <= LEVEL.keys():
            wrong += [edge] if LEVEL[one] >= LEVEL[other] else []
    return wrong


def backward(all_imports: Iterable[Import]) -> list[Import]:
    """The imports from a top package to one above it."""
    below = {
        "engine3d": {"hybridflow", "launch", "benchmarks", "tests"},
        "hybridflow": {"launch", "benchmarks", "tests"},
    }
    return [edge for edge in all_imports if edge.imported.split(".")[0] in below.get(edge.module.split(".")[0], ())]


def forbidden(all_imports: Iterable[Import]) -> list[Import]:
    """The imports of libraries that a package is to know nothing of."""
    return [
        edge
        for edge in all_imports
        for package, libraries in OUTSIDE.items()
        if is_in(edge.module, package) and edge.imported.split(".")[0] in libraries
    ]


def circles(edges: Iterable[tuple[str, str]]) -> set[tuple[str, ...]]:
    """The strongly connected components of more than one node (Tarjan's algorithm), each sorted."""
    followers: dict[str, set[str]] = {}
    for one, other in edges:
        followers.setdefault(one, set()).add(other)
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    cycles: set[tuple[str, ...]] = set()

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in followers.get(node, ()):
            if other not in index:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], index[other])
        if lowest[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                cycles.add(tuple(sorted(members)))

    for node in list(followers):
        if node not in index:
            visit(node)
    return cycles


def circles_in(top: str, all_imports: Iterable[Import], known: Mapping[str, Path]) -> dict[str, set[tuple[str, ...]]]:
    """Circles of the modules and of the packages below a top package."""
    inner = [(edge.module, edge.imported) for edge in all_imports if is_in(edge.module, top) and edge.imported in known]
    inner = [(one, other) for one, other in inner if is_in(other, top)]
    folders = {package_of(module) for module in known if module.count(".") > 1}
    outer = [(package_of(one), package_of(other)) for one, other in inner]
    outer = [(one, other) for one, other in outer if one != other and {one, other} <= folders]
    return {f"modules of {top}": circles(inner), f"packages of {top}": circles(outer)}


@pytest.fixture(scope="module")
def repository() -> list[Import]:
    return imports(ROOT)


@pytest.mark.parametrize("top", ORDERS)
def test_every_package_has_its_place(top: str) -> None:
    folders = {f"{top}.{path.parent.name}" for path in (ROOT / top).glob("*/__init__.py")}
    assert folders <= LEVEL.keys()


@pytest.mark.slow
def test_imports_go_downwards(repository: list[Import]) -> None:
    assert list(map(str, upward(repository))) == []


def test_hybridflow_is_on_top_of_engine3d(repository: list[Import]) -> None:
    assert list(map(str, backward(repository))) == []


def test_each_package_keeps_off_the_libraries_of_others(repository: list[Import]) -> None:
    assert list(map(str, forbidden(repository))) == []


@pytest.mark.parametrize("top", ORDERS)
def test_there_are_no_circles(top: str, repository: list[Import]) -> None:
    assert not any(circles_in(top, repository, modules(ROOT)).values())


WRONG = {
    "hybridflow/data/prompts.py": "from hybridflow.trainer.step import TrainerStep",
    "hybridflow/rewards/config.py": "def later():\n    import hybridflow.data.prompts",
    "hybridflow/metrics/names.py": "if TYPE_CHECKING:\n    from ..batch import remote_batch",
    "hybridflow/batch/remote_batch.py": "importlib.import_module('hybridflow.metrics.names')",
    "hybridflow/trainer/step.py": "from sglang.srt import server\nimport benchmarks.step",
    "hybridflow/algorithms/grpo.py": "import ray.util",
    "engine3d/models/build.py": "from engine3d.training import engine",
    "engine3d/training/engine.py": "import torch",
    "engine3d/layout.py": "import hybridflow.data\ndef start():\n    from ray import get",
    "engine3d/one.py": "from . import two",
    "engine3d/two.py": "if TYPE_CHECKING:\n    from .one import One",
    "benchmarks/step.py": "from hybridflow.trainer import step",
}


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    for name, text in WRONG.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    all_imports, known = imports(tmp_path), modules(tmp_path)
    assert sorted(map(str, upward(all_imports))) == [
        "engine3d.models.build:1 imports engine3d.training.engine",
        "hybridflow.batch.remote_batch:1 imports hybridflow.metrics.names",
        "hybridflow.data.prompts:1 imports hybridflow.trainer.step",
        "hybridflow.metrics.names:2 imports hybridflow.batch.remote_batch",
        "hybridflow.rewards.config:2 imports hybridflow.data.prompts",
    ]
    assert sorted(map(str, backward(all_imports))) == [
        "engine3d.layout:1 imports hybridflow.data",
        "hybridflow.trainer.step:2 imports benchmarks.step",
    ]
    assert sorted(map(str, forbidden(all_imports))) == [
        "engine3d.layout:3 imports ray",
        "hybridflow.algorithms.grpo:1 imports ray.util",
        "hybridflow.trainer.step:1 imports sglang.srt",
    ]
    assert circles_in("engine3d", all_imports, known)["modules of engine3d"] == {("engine3d.one", "engine3d.two")}
    assert circles_in("hybridflow", all_imports, known) == {
        "modules of hybridflow": {("hybridflow.batch.remote_batch", "hybridflow.metrics.names")},
        "packages of hybridflow": {("hybridflow.batch", "hybridflow.metrics")},
    }


def test_circles_of_several() -> None:
    ring = [*pairwise("abcd"), ("d", "a"), ("d", "e"), ("e", "f"), ("f", "e"), ("x", "a")]
    assert circles(ring) == {("a", "b", "c", "d"), ("e", "f")}


def test_files_beside_the_modules_are_installed_with_their_package() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    for top in ("hybridflow", "engine3d"):
        for path in (ROOT / top).rglob("*"):
            if path.is_file() and path.suffix not in {".py", ".pyc", ".md"}:
                package = next(folder for folder in path.parents if (folder / "__init__.py").exists())
                assert any(fnmatch(str(path.relative_to(package)), pattern) for pattern in patterns), path


@pytest.mark.slow
def test_a_program_runs_after_all_that_its_module_defines() -> None:
    early = [
        f"{module}:{statement.lineno}"
        for module, path in modules(ROOT).items()
        for statement in ast.parse(path.read_text()).body[:-1]
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test)
    ]
    assert not early, f"what stands below is not defined yet when the program runs: {early}"
