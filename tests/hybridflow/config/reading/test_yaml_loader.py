"""Settings from YAML and overrides: what is read, and that every error is one line that says where and what."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, model_validator

from engine3d.layout import Layout
from engine3d.settings import AbsolutePath, Settings
from hybridflow.config.reading.yaml_loader import SettingsError, load_settings, settings_yaml


class Optimizer(Settings):
    lr: float = Field(1e-3, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"
    steps: int | Literal["all"] = 10


class Role(Settings):
    devices: str = "cpu:0"


class Example(Settings):
    name: str
    verbose: bool = False
    optimizer: Optimizer = Optimizer()
    layout: Layout = Layout()
    roles: dict[str, Role] = Field(default_factory=dict)
    stops: tuple[Role, ...] = ()
    extra: Role | None = None

    @model_validator(mode="after")
    def _agree(self) -> Example:
        if self.name == "cosine" and self.optimizer.schedule != "cosine":
            raise ValueError("name 'cosine' needs optimizer.schedule=cosine")
        return self


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "# a comment\nname: demo\noptimizer:\n  lr: 1e-5\n  steps: 10_000\nroles:\n  actor: {devices: cpu:0-1}\n"
    )
    return path


def errors(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        load_settings(Example, path, overrides)
    assert all("\n" not in line for line in caught.value.lines)
    return caught.value.lines


class Named(Settings):
    name: str = Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    directory: AbsolutePath = Path("runs")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("name=a/b", "name = 'a/b': expected letters, digits, '.', '_' and '-', the first a letter or a digit"),
        (f"name={'a' * 300}", f"name = '{'a' * 56}...: expected at most 200 characters"),
        ("name=''", "name = '': expected at least 1 character"),
        (f"directory=/tmp/{'a/' * 2500}", "directory: a path of 5,004 bytes, expected at most 4,000"),
        (f"directory=/tmp/{'é' * 150}", "directory: a path with a name of 300 bytes, expected at most 255"),
    ],
)
def test_names_and_paths_that_no_directory_can_have(tmp_path: Path, override: str, line: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: run")
    with pytest.raises(SettingsError) as caught:
        load_settings(Named, path, [override])
    assert len(caught.value.lines) == 1 and caught.value.lines[0].endswith(f": {line}"), caught.value.lines


def errors_in(path: Path, text: str) -> tuple[str, ...]:
    path.write_text(text)
    return errors(path)


def test_numbers_are_read_as_people_write_them(recipe: Path) -> None:
    settings = load_settings(Example, recipe)
    assert settings.optimizer == Optimizer(lr=1e-5, steps=10000)
    assert settings.roles == {"actor": Role(devices="cpu:0-1")}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("012", 12),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("", None),
        ("e5", "e5"),
        ("1e", "1e"),
        ("'5'", "5"),
        ("[1, a]", [1, "a"]),
        ("2026-01-01", "2026-01-01"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    from hybridflow.config.reading.yaml_loader import parse_override

    read = parse_override(f"key={text}").value
    assert read == value
    assert type(read) is type(value)


def test_overrides_apply_in_order_and_make_groups(recipe: Path) -> None:
    settings = load_settings(
        Example,
        recipe,
        ["optimizer.lr=3e-4", "roles.critic.devices=cpu:3", "extra={devices: x=y}", "optimizer.lr=2e-4"],
    )
    assert settings.optimizer.lr == 2e-4
    assert settings.roles["critic"].devices == "cpu:3"
    assert settings.extra == Role(devices="x=y")


def test_a_file_of_another_language_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text("max_steps = 10\n[model]\nname = 'x'\n")
    with pytest.raises(SettingsError, match=r"rl\.toml: a TOML file, expected a recipe in YAML"):
        load_settings(Example, tmp_path / "rl.toml")


def test_settings_survive_being_written(recipe: Path, tmp_path: Path) -> None:
    settings = load_settings(Example, recipe, ["optimizer.lr=1e-6"])
    (tmp_path / "again.yaml").write_text(settings_yaml(settings))
    assert load_settings(Example, tmp_path / "again.yaml") == settings


def test_settings_are_frozen(recipe: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_settings(Example, recipe).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.lr=fast", "optimizer.lr = 'fast': expected a number"),
        ("optimizer.lr=-1", "optimizer.lr = -1: expected more than 0.0"),
        ("optimizer.lr=.nan", "optimizer.lr = nan: expected a finite number"),
        ("optimizer.schedule=cosin", "optimizer.schedule = 'cosin': expected one of 'constant' or 'cosine'"),
        ("optimizer.steps=few", "optimizer.steps = 'few': expected a whole number or 'all'"),
        ("optimizer=3", "optimizer = 3: expected the keys lr, schedule, steps"),
        ("verbose=maybe", "verbose = 'maybe': expected true or false"),
        ("name=5", "name = 5: expected text (put a number in quotes to make it text)"),
        ("optimiser.lr=1", "unknown key optimiser: did you mean optimizer?"),
        ("optimizer.shedule=1", "unknown key optimizer.shedule: did you mean optimizer.schedule?"),
        ("optimizer.x=1", "unknown key optimizer.x: optimizer takes lr, schedule, steps"),
        ("roles.actor.device=1", "unknown key roles.actor.device: did you mean roles.actor.devices?"),
        ("stops=[{device: 1}]", "unknown key stops.0.device: did you mean stops.0.devices?"),
        ("extra.device=1", "unknown key extra.device: did you mean extra.devices?"),
        ("layout.tpp=2", "unknown key layout.tpp: did you mean layout.tp?"),
        ("layout={tp:2}", "unknown key layout.tp:2: expected a space behind the colon, as in {tp: 2}"),
    ],
)
def test_a_wrong_override_is_one_line(recipe: Path, override: str, line: str) -> None:
    assert errors(recipe, override) == (f"override {override}: {line}",)


def test_places_are_files_and_lines(recipe: Path) -> None:
    lines = errors_in(recipe, "name: x\noptimizer:\n  lr: fast\n  rate: 1\nverbos: true\n")
    assert lines == (
        f"{recipe}:3: optimizer.lr = 'fast': expected a number",
        f"{recipe}:4: unknown key optimizer.rate: optimizer takes lr, schedule, steps",
        f"{recipe}:5: unknown key verbos: did you mean verbose?",
    )


def test_what_no_line_holds_is_the_files(recipe: Path) -> None:
    assert errors_in(recipe, "verbose: true\n") == (f"{recipe}: name is missing and has no default",)
    assert errors_in(recipe, "") == (f"{recipe}: name is missing and has no default",)
    assert errors_in(recipe, "name: cosine\n") == (f"{recipe}: name 'cosine' needs optimizer.schedule=cosine",)
    assert errors_in(recipe, "name: x\nlayout: {tp: 0}\n") == (
        f"{recipe}: layout: tp=0, expected a whole number of at least 1",
    )


def test_a_key_that_stands_twice_is_refused(recipe: Path) -> None:
    text = "name: x\noptimizer:\n  lr: 1\n  lr: 2\n"
    assert errors_in(recipe, text) == (f"{recipe}:4: the key lr stands twice, also on line 3",)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: [\n", "2: "),
        ("- 1\n", "expected keys and values, found a list"),
        ("a:\n\tb: 1", "2: "),
        (r'name: "\U00110000"', "chr() arg not in range"),
    ],
)
def test_what_is_not_a_mapping_in_yaml_is_refused(recipe: Path, text: str, line: str) -> None:
    (message,) = errors_in(recipe, text)
    assert message.startswith(str(recipe))
    assert line in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "no such file" in errors(tmp_path / "none.yaml")[0]
    assert errors(tmp_path)[0].endswith(": a directory, expected a recipe in YAML")
    (tmp_path / "recipe.yaml").touch()
    assert errors(tmp_path)[0].endswith(f": a directory, expected {tmp_path}/recipe.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\xfe")
    assert "not a text file" in errors(tmp_path / "bytes.yaml")[0]


@pytest.mark.parametrize("override", ["novalue", "=1", "a..b=1", ".a=1", "name.x=1", "name=[1"])
def test_what_is_not_an_override(recipe: Path, override: str) -> None:
    (line,) = errors(recipe, override)
    assert line.startswith("override ")
    assert override in line


def test_all_errors_are_reported(recipe: Path) -> None:
    assert len(errors(recipe, "optimizer.lr=x", "verbose=x", "zzz=1")) == 3


def test_a_file_stands_on_its_base(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    files = {
        "far/bottom.yaml": "name: bottom\noptimizer: {lr: 1e-5, steps: 3}\nroles:\n  actor: {devices: cpu:0}\n",
        "middle.yaml": "base: far/bottom.yaml\nname: middle\nroles:\n  critic: {devices: cpu:1}\n",
        "top.yaml": "base: middle.yaml\noptimizer: {lr: 2e-5}\nstops: [{devices: cpu:3}]\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    settings = load_settings(Example, tmp_path / "top.yaml", ["optimizer.schedule=cosine"])
    assert settings.name == "middle"
    assert settings.optimizer == Optimizer(lr=2e-5, schedule="cosine", steps=3)
    assert settings.roles == {"actor": Role(devices="cpu:0"), "critic": Role(devices="cpu:1")}
    assert settings.stops == (Role(devices="cpu:3"),)
    (tmp_path / "far/bottom.yaml").write_text("name: bottom\noptimizer:\n  steps: many\n")
    (line,) = errors(tmp_path / "top.yaml")
    assert line.startswith(f"{tmp_path}/far/bottom.yaml:3: optimizer.steps = 'many': ")


def test_bases_that_lead_nowhere(tmp_path: Path) -> None:
    path, other = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert errors_in(path, "name: x\nbase: none.yaml\n") == (f"{path}:2: base: {tmp_path}/none.yaml: no such file",)
    assert errors_in(path, "base: 3\n") == (f"{path}:1: base: 3 is no path, expected another YAML file",)
    other.write_text("base: a.yaml\n")
    assert errors_in(path, "base: b.yaml\n") == (f"{other}:1: base: a.yaml has this file as its own base",)
