"""Makes docs/configuration.md from the models of a recipe: every setting with type, default, bounds and meaning.

python docs/generate_configuration.py           write the page
python docs/generate_configuration.py --check   fail if the page is not what the models say
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ForwardRef, Literal, Union

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hybridflow.algorithms.config import DEFAULT, load
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.recipe import Recipe

PAGE = Path(__file__).parent / "configuration.md"
COMMAND = "python docs/generate_configuration.py"

_INTRODUCTION = f"""\
# Configuration

A recipe is a YAML file. Every setting can be given on the command line too, by its dotted name, after the recipe:

    hybridflow train launch/recipes/demo.yaml seed=2 train.layout.ep=1 train.layout.tp=2

A value is YAML: `reward.functions='[{{name: mine, path: "my_rewards.py:score"}}]'`, `trainer.eval_interval=null`.
Unknown keys are refused; for names that other systems use, the line says what the setting is called here.

`base: demo.yaml` in a recipe, relative to its file, takes all settings of that recipe; what follows comes on top. All
other relative paths start from the directory where the command runs. A run writes its recipe, with every default, to
`recipe.yaml` in its directory.

A setting without a default is required once its group is given. This page is made from the models of the settings by
`{COMMAND}`; a test compares the two.
"""

_MEANINGS = {
    "algorithm.name": "The algorithm: "
    + ", ".join(f"`{name}`" for name in ALGORITHMS)
    + "; or `file.py:ALGORITHM` of a [file of your own](adding_an_algorithm.md#in-a-file-of-your-own)."
}
"""Of settings whose models cannot say it."""

_SAME = {
    "critic": "reference",
    "evaluation.NAME.data": "data.files.train",
    "evaluation.NAME.reward": "reward",
    "evaluation.NAME.sampling": "trainer.eval_sampling",
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


def page() -> str:
    """docs/configuration.md."""
    return "\n".join([_INTRODUCTION, *_group("", Recipe, None)]).rstrip() + "\n"


def _group(prefix: str, model: type[BaseModel], default: Any) -> Iterator[str]:
    """A table of a group's own settings, and one of every group in it."""
    own, inner = [], []
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if path == "algorithm":
            inner.append((path, None, None, ""))
        elif (found := _model_of(field.annotation)) is not None:
            listed = _is_list(field.annotation)
            meaning = "" if listed else _meaning(path, model, name, field)
            inner.append((path, found, _default_of(model, name, field, default), meaning))
            if listed:
                own.append(_row(path, model, name, field, default))
        else:
            own.append(_row(path, model, name, field, default))
    if own:
        yield from _table(own)
    for path, found, value, meaning in inner:
        if path == "algorithm":
            yield from ("## `algorithm`", "", *_algorithms())
            continue
        assert found is not None
        yield from _section(path, found, value, meaning)


def _section(path: str, model: type[BaseModel], value: Any, meaning: str) -> Iterator[str]:
    """A group under its heading."""
    yield f"{'#' * min(2 + path.count('.'), 4)} `{path}`"
    yield ""
    about = [*_summary(model), *([meaning] if meaning else []), *(["Null unless given."] if value is None else [])]
    yield from textwrap.wrap(" ".join(about), 120, break_long_words=False, break_on_hyphens=False)
    yield ""
    if same := _SAME.get(path):
        yield f"Settings as in [`{same}`](#{_anchor(same)}){_other_defaults(model, value)}."
        yield ""
        return
    prefix = {"functions": f"{path}[].", "evaluation": f"{path}.NAME."}.get(path.rpartition(".")[2], f"{path}.")
    yield from _group(prefix, model, value)


def _other_defaults(model: type[BaseModel], value: Any) -> str:
    """Defaults of a group that are not those of its class."""
    if not isinstance(value, BaseModel):
        return ""
    plain = {name: field.default for name, field in model.model_fields.items()}
    others = [f"`{name}={_shown(getattr(value, name))}`" for name in plain if getattr(value, name) != plain[name]]
    return f", but for the default {' and '.join(others)}" if others else ""


def _algorithms() -> Iterator[str]:
    """The settings that all algorithms have, and what each adds."""
    yield "The algorithm and its constants, by `algorithm.name`. A setting that the algorithm does not use is refused."
    yield ""
    shared = list(AlgorithmSettings.model_fields)
    model = load(DEFAULT).settings
    groups = {name: found for name in shared if (found := _model_of(model.model_fields[name].annotation)) is not None}
    plain = [name for name in shared if name not in groups]
    yield from _table([_row(f"algorithm.{name}", AlgorithmSettings, name, model.model_fields[name]) for name in plain])
    users: dict[str, list[str]] = {}
    for algorithm in ALGORITHMS:
        for name in load(algorithm).settings.model_fields:
            if name not in shared:
                users.setdefault(name, []).append(algorithm)
    for names in dict.fromkeys(tuple(each) for each in users.values()):
        yield f"Only with {' or '.join(f'`{name}`' for name in names)}:"
        yield ""
        wanted = [name for name, each in users.items() if tuple(each) == names]
        yield from _table([_algorithm_row(name, names) for name in wanted])
    for name, group in groups.items():
        field, path = model.model_fields[name], f"algorithm.{name}"
        yield from _section(path, group, field.default, _meaning(path, AlgorithmSettings, name, field))


def _algorithm_row(name: str, algorithms: Sequence[str]) -> str:
    """A setting of several algorithms: what the class says that has it first, and the defaults of others."""
    models = {algorithm: load(algorithm).settings for algorithm in algorithms}
    bases = [base for base in reversed(models[algorithms[-1]].__mro__) if name in getattr(base, "model_fields", ())]
    row = _row(f"algorithm.{name}", bases[0], name, bases[0].model_fields[name])
    others: dict[str, list[str]] = {}
    for algorithm, model in models.items():
        if model.model_fields[name].default != bases[0].model_fields[name].default:
            others.setdefault(_shown(model.model_fields[name].default), []).append(f"`{algorithm}`")
    told = "; ".join(f"`{value}` with {' and '.join(users)}" for value, users in others.items())
    return f"{row.removesuffix(' |')} Default {told}. |" if told else row


def _table(rows: Sequence[str]) -> Iterator[str]:
    yield "| setting | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from rows
    yield ""


def _row(path: str, model: type[BaseModel], name: str, field: FieldInfo, default: Any = None) -> str:
    value = _default_of(model, name, field, default)
    shown = "required" if value is PydanticUndefined else f"`{_shown(value)}`"
    if _is_list(field.annotation) and _model_of(field.annotation) is not None:
        shown = (
            "the built-in task's"
            if path.endswith("functions")
            else shown
            if value in (None, PydanticUndefined)
            else "none"
        )
    meaning = _meaning(path, model, name, field)
    if not meaning:
        raise SystemExit(f"{path} has no meaning: write one below it in {model.__module__}")
    cells = (f"`{path}`", _type(field), shown, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default_of(model: type[BaseModel], name: str, field: FieldInfo, parent: Any) -> Any:
    """Of a setting: what its group's default says, or else its class."""
    if isinstance(parent, model):
        return getattr(parent, name)
    return field.get_default(call_default_factory=True)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Path):
        return value.name  # it is made absolute when it is read
    return str(value)


def _type(field: FieldInfo) -> str:
    """The type of a setting as YAML has it, and its bounds."""
    kinds = list(dict.fromkeys(_kinds(field.annotation)))
    bounds = list(_bounds([*field.metadata, *_inner_metadata(field.annotation)]))
    nullable = "null" in kinds
    text = ", ".join(["; ".join(kind for kind in kinds if kind != "null"), *bounds])
    return f"{text}; or null" if nullable else text


def _kinds(annotation: Any) -> Iterator[str]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        yield from _kinds(parts[0])
    elif origin is Literal:
        yield " or ".join(f"`{part}`" for part in parts)
    elif origin in (Union, types.UnionType):
        for part in parts:
            yield from _kinds(part)
    elif origin in (tuple, list):
        yield "list" if _model_of(parts[0]) else f"list of {' or '.join(_kinds(parts[0]))}"
    elif origin is dict:
        yield "mapping"
    else:
        names = {int: "integer", float: "number", bool: "boolean", str: "text", Path: "path", type(None): "null"}
        yield names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) is Annotated:
        for each in typing.get_args(annotation)[1:]:
            yield from each.metadata if isinstance(each, FieldInfo) else [each]
    elif typing.get_origin(annotation) in (Union, types.UnionType):
        for part in typing.get_args(annotation):
            yield from _inner_metadata(part)


def _bounds(metadata: Sequence[Any]) -> Iterator[str]:
    words = (("Ge", "ge", "at least"), ("Gt", "gt", "above"), ("Le", "le", "at most"), ("Lt", "lt", "below"))
    for kind, name, word in words:
        for each in metadata:
            if isinstance(each, getattr(annotated_types, kind)):
                yield f"{word} {_shown(getattr(each, name))}"


@cache
def _docs(model: type[BaseModel]) -> dict[str, str]:
    """The texts below the settings of a class and of those that it derives from."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (isinstance(base, type) and issubclass(base, BaseModel)) or base is BaseModel:
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for setting, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(setting, ast.AnnAssign) and isinstance(setting.target, ast.Name):
                found.pop(setting.target.id, None)
                if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[setting.target.id] = " ".join(str(text.value.value).split())
    return found


def _meaning(path: str, model: type[BaseModel], name: str, field: FieldInfo) -> str:
    said = _MEANINGS.get(path) or field.description or _docs(model).get(name) or ""
    text = " ".join(said.split())
    name_of_a_type = text.startswith(("bf16", "float"))
    begin = text[:1] if name_of_a_type else text[:1].upper()
    return begin + text[1:] + ("" if not text or text.endswith(".") else ".")


def _summary(model: type[BaseModel]) -> Iterator[str]:
    """What a class says of itself, but for what is told of each setting."""
    text = inspect.cleandoc(model.__doc__ or "").strip()
    yield " ".join(text.split())


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The class of the settings that a setting is a group of; None where it is no group."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, ForwardRef) or typing.get_origin(annotation) is Literal:
        return None
    return next((found for part in typing.get_args(annotation) if (found := _model_of(part)) is not None), None)


def _is_list(annotation: Any) -> bool:
    """Whether a setting holds several groups: a list of them, or some by their names."""
    return typing.get_origin(annotation) in (tuple, list, dict)


def _anchor(path: str) -> str:
    return path.replace(".", "")


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
        return 0
    if PAGE.read_text() == page():
        return 0
    print(f"{PAGE.name} is not what the models say; renew it: {COMMAND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
