"""Secrets of settings reach neither recipe.yaml nor manifests, messages or W&B; what only sounds like one stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.checkpoint.compatibility import changes
from hybridflow.config.reading.yaml_loader import SettingsError, load_settings, public_settings, settings_yaml
from hybridflow.config.recipe import Recipe, load_recipe
from hybridflow.errors.redaction import REDACTED, is_secret, redacted, redacted_arguments, redacted_override

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "launch/recipes/demo.yaml"
SECRET = "hunter2-of-this-test"


@pytest.mark.parametrize(
    "name",
    ["api_key", "admin_api_key", "ssl_keyfile_password", "hf_token", "token", "apiKey", "AWS_SECRET_ACCESS_KEY",
     "auth-token", "client_secret", "credentials", "wandb_api_key", "password", "api_keys", "github_token"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert redacted({"a": [{name: SECRET}], name: {"inner": SECRET}}) == redacted(
        {"a": [{name: "another"}], name: {"inner": "another"}}
    )


@pytest.mark.parametrize(
    "name",
    ["max_new_tokens", "max_total_tokens", "eos_token", "pad_token", "bos_token_id", "stop_token_ids", "tokenizer",
     "num_key_value_heads", "skip_tokenizer_init", "micro_batch_tokens", "ssl_keyfile", "prompt_key", "token_level",
     "loss_aggregation", "keep_last", "input_key", "reward_fn_key", "metadata_key", "fused_query_key"],
)  # fmt: skip
def test_names_that_only_sound_like_it(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "launch/recipes").rglob("*.yaml")), ids=lambda path: path.stem)
def test_no_setting_of_ours_is_taken_for_a_secret(path: Path) -> None:
    if path.parent.name == "recipes":
        recipe = load_recipe(path)
        assert public_settings(recipe) == recipe.model_dump(mode="json")


def with_secret(secret: str) -> Recipe:
    recipe = load_recipe(DEMO)
    engine = recipe.rollout.engine.model_copy(update={"server_args": {"api_key": secret, "x": {"hf_token": secret}}})
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"engine": engine})})


def test_secrets_do_not_reach_what_a_run_writes() -> None:
    recipe = with_secret(SECRET)
    written = settings_yaml(recipe)
    assert SECRET not in written and f"api_key: {REDACTED}" in written
    manifest = public_settings(recipe)
    assert SECRET not in str(manifest)
    assert changes(public_settings(with_secret("another")), manifest) == []


def test_a_recipe_without_its_secrets_asks_for_them(tmp_path: Path) -> None:
    public = public_settings(with_secret(SECRET))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(public))
    with pytest.raises(SettingsError) as caught:
        load_settings(Recipe, path)
    assert [line.removeprefix(f"{path}: ") for line in caught.value.lines] == [
        f"rollout.engine.server_args.{name}: {REDACTED} stands for a secret; write it again"
        for name in ("api_key", "x.hf_token")
    ]


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        (f"a.api_key={SECRET}", f"a.api_key={REDACTED}"),
        (f"a={{api_key: {SECRET}}}", f"a={REDACTED}"),
        (f"a.url=https://me:{SECRET}@host/x", f"a.url=https://me:{REDACTED}@host/x"),
        ("a.max_new_tokens=4", "a.max_new_tokens=4"),
        ("train", "train"),
    ],
)
def test_overrides_are_shown_without_secrets(override: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert redacted_override(override) == shown
    monkeypatch.setattr(sys, "argv", ["hybridflow", override])
    with redacted_arguments():
        assert sys.argv == ["hybridflow", shown]
    assert sys.argv == ["hybridflow", override]


@pytest.mark.parametrize(
    "override",
    [f"train.api_key={SECRET}", f"train={{api_key: {SECRET}}}", f"data.api_key=[{SECRET}", f"seed={{token: {SECRET}}}",
     f"trainer.steps=https://me:{SECRET}@host"],
)  # fmt: skip
def test_errors_are_told_without_secrets(override: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, [override])
    assert SECRET not in str(caught.value)


def test_numbers_and_switches_of_secret_names() -> None:
    given: dict[str, Any] = {"password": 1234, "api_key": None, "token": True, "tokens": [1, 2]}
    assert redacted(given) == {"password": REDACTED, "api_key": None, "token": True, "tokens": [1, 2]}


def test_a_long_override_is_read_once() -> None:
    begin = time.process_time()
    assert redacted_override(f"seed={'9' * 100_000}") == f"seed={'9' * 100_000}"
    assert time.process_time() - begin < 5  # 100 s if each character began another search
