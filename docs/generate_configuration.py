"""Makes docs/configuration.md and the pages in docs/configuration/ from the models of a recipe.

Each lists settings with type, default, bounds and meaning.

python docs/generate_configuration.py           write the pages
python docs/generate_configuration.py --check   fail if a page is not what the models say
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from hybridflow.algorithms.config import DEFAULT, load
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.reading.described_settings import (
    default_of,
    described,
    inner_prefix,
    is_list,
    meaning_of,
    model_of,
    shown,
    summary_of,
)
from hybridflow.config.recipe import Recipe

DOCS = Path(__file__).parent
COMMAND = "python docs/generate_configuration.py"

_INTRODUCTION = f"""\
# Configuration

A recipe is a YAML file. Every setting can be given on the command line too, by its dotted name, after the recipe:

    hybridflow train launch/recipes/demo.yaml seed=2 train.layout.ep=1 train.layout.tp=2

A value is YAML: `reward.functions='[{{name: mine, path: "my_rewards.py:score"}}]'`, `checkpoint.save_interval=null`.
Unknown keys are refused; for names that other systems use, the line says what the setting is called here.

`base: demo.yaml` in a recipe, relative to its file, takes all settings of that recipe; what follows comes on top. All
other relative paths start from the directory where the command runs. A run writes its recipe, with every default, to
`recipe.yaml` in its directory.

A setting without a default is required once its group is given. This page and those of the groups are made from the
models of the settings by `{COMMAND}`. A test compares them.

`hybridflow settings NAME` prints the same for one setting or group.
"""

_PAGES = {
    "model": ("Model and training", ("model", "train", "warmup")),
    "rollout": ("Rollout", ("rollout",)),
    "algorithm": ("Algorithm", ("algorithm",)),
    "roles": ("Other roles", ("reference", "teacher", "critic", "cost_critic", "reward_model", "cost_model", "judge")),
    "data": ("Data", ("data",)),
    "reward": ("Rewards, costs and environments", ("reward", "cost", "environment")),
    "run": ("Steps, evaluation, checkpoints and limits", ("trainer", "evaluation", "checkpoint", "limits")),
    "records": ("Metrics and samples", ("metrics", "samples")),
    "placement": ("Placement and network", ("placement", "network")),
}
"""Pages in docs/configuration/: title and groups."""

_SAME = {
    "critic": "reference",
    "evaluation.NAME.data": "data.files.train",
    "evaluation.NAME.reward": "reward",
    "cost_critic": "reference",
    "cost": "reward",
    "cost_model": "reward_model",
    "reference.train": "train",
    "reward_model.train": "train",
    "teacher.train": "train",
    "teacher.engine": "rollout.engine",
    "warmup.optimizer": "train.optimizer",
}
"""Groups that have the settings of another one, which are listed there."""


def pages() -> dict[Path, str]:
    """The text of every page."""
    plain, inner = _settings("", Recipe, None)
    sections = {path: _section(path, model, value, meaning) for path, model, value, meaning in inner}
    sections["algorithm"] = iter(("## `algorithm`", "", *_algorithms()))
    index = [_INTRODUCTION, "| page | groups |", "|---|---|"]
    texts = {}
    for name, (title, groups) in _PAGES.items():
        links = ", ".join(f"[`{group}`](configuration/{name}.md#{_anchor(group)})" for group in groups)
        index.append(f"| [{title}](configuration/{name}.md) | {links} |")
        lines = [line.replace("](adding_", "](../adding_") for group in groups for line in sections.pop(group)]
        lines = [f"# {title}", "", "[All groups](../configuration.md)", "", *lines]
        texts[DOCS / "configuration" / f"{name}.md"] = "\n".join(lines).rstrip() + "\n"
    if sections:
        raise ValueError(f"groups without a page: {', '.join(sections)}; expected each in _PAGES")
    index += ["", "Settings without a group:", "", *_table(plain)]
    return {DOCS / "configuration.md": "\n".join(index).rstrip() + "\n", **texts}


def _group(prefix: str, model: type[BaseModel], default: Any) -> Iterator[str]:
    """A table of a group's own settings, and one of every group in it."""
    plain, inner = _settings(prefix, model, default)
    if plain:
        yield from _table(plain)
    for path, group, value, meaning in inner:
        yield from _section(path, group, value, meaning)


_InnerGroup = tuple[str, type[BaseModel], Any, str]
"""Dotted name, model, default and meaning of a group."""


def _settings(prefix: str, model: type[BaseModel], default: Any) -> tuple[list[str], list[_InnerGroup]]:
    """Rows of a group's own settings, and the groups in it but the algorithm, whose settings depend on its name."""
    plain, inner = [], []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path == "algorithm":
            continue
        if (group := model_of(field.annotation)) is not None:
            listed = is_list(field.annotation)
            meaning = "" if listed else meaning_of(path, model, name, field)
            inner.append((path, group, default_of(model, name, field, default), meaning))
            if listed:
                plain.append(_row(path, model, name, field, default))
        else:
            plain.append(_row(path, model, name, field, default))
    return plain, inner


def _section(path: str, model: type[BaseModel], value: Any, meaning: str) -> Iterator[str]:
    """A group under its heading."""
    yield f"{'#' * min(2 + path.count('.'), 4)} `{path}`"
    yield ""
    about = [*summary_of(model), *([meaning] if meaning else []), *(["Null unless given."] if value is None else [])]
    yield from textwrap.wrap(" ".join(about), 120, break_long_words=False, break_on_hyphens=False)
    yield ""
    if same := _SAME.get(path):
        [page] = [name for name, (_, groups) in _PAGES.items() if same.split(".")[0] in groups]
        yield f"Settings as in [`{same}`]({page}.md#{_anchor(same)}){_other_defaults(model, value)}."
        yield ""
        return
    yield from _group(inner_prefix(path), model, value)


def _other_defaults(model: type[BaseModel], value: Any) -> str:
    """Defaults of a group that are not those of its class."""
    if not isinstance(value, BaseModel):
        return ""
    plain = {name: field.default for name, field in model.model_fields.items()}
    others = [f"`{name}={shown(getattr(value, name))}`" for name in plain if getattr(value, name) != plain[name]]
    return f", but for the default {' and '.join(others)}" if others else ""


def _algorithms() -> Iterator[str]:
    """The settings that all algorithms have, and what each adds."""
    yield "The algorithm and its constants, by `algorithm.name`. A setting that the algorithm does not use is refused."
    yield ""
    shared = list(AlgorithmSettings.model_fields)
    model = load(DEFAULT).settings
    groups = {name: group for name in shared if (group := model_of(model.model_fields[name].annotation)) is not None}
    plain = [name for name in shared if name not in groups]
    yield from _table([_row(f"algorithm.{name}", AlgorithmSettings, name, model.model_fields[name]) for name in plain])
    users: dict[str, list[str]] = {}
    for algorithm in ALGORITHMS:
        for name in load(algorithm).settings.model_fields:
            if name not in shared:
                users.setdefault(name, []).append(algorithm)
    for names in dict.fromkeys(map(tuple, users.values())):
        yield f"Only with {' or '.join(f'`{name}`' for name in names)}:"
        yield ""
        rows = [_algorithm_row(name, names) for name, algorithms in users.items() if tuple(algorithms) == names]
        yield from _table(rows)
    for name, group in groups.items():
        field, path = model.model_fields[name], f"algorithm.{name}"
        yield from _section(path, group, field.default, meaning_of(path, AlgorithmSettings, name, field))


def _algorithm_row(name: str, algorithms: Sequence[str]) -> str:
    """A setting of several algorithms: what the class says that has it first, and the defaults of others."""
    models = {algorithm: load(algorithm).settings for algorithm in algorithms}
    bases = [base for base in reversed(models[algorithms[-1]].__mro__) if name in getattr(base, "model_fields", ())]
    row = _row(f"algorithm.{name}", bases[0], name, bases[0].model_fields[name])
    others: dict[str, list[str]] = {}
    for algorithm, model in models.items():
        if model.model_fields[name].default != bases[0].model_fields[name].default:
            others.setdefault(shown(model.model_fields[name].default), []).append(f"`{algorithm}`")
    defaults = "; ".join(f"`{value}` with {' and '.join(users)}" for value, users in others.items())
    return f"{row.removesuffix(' |')} Default {defaults}. |" if defaults else row


def _table(rows: Sequence[str]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from rows
    yield ""


def _row(path: str, model: type[BaseModel], name: str, field: FieldInfo, default: Any = None) -> str:
    setting = described(path, model, name, field, default)
    value = f"`{setting.default}`" if setting.is_value else setting.default
    cells = (f"`{path}`", setting.type, value, setting.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _anchor(path: str) -> str:
    return path.replace(".", "")


def main() -> int:
    texts = pages()
    unknown = set((DOCS / "configuration").glob("*.md")) - texts.keys()
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for path in unknown:
            path.unlink()
        return 0
    others = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for path in [*others, *sorted(unknown)]:
        print(f"{path.relative_to(DOCS)} is not what the models say; renew it: {COMMAND}", file=sys.stderr)
    return 1 if others or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
