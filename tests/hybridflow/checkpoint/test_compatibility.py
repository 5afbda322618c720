"""Identities of the files that a run reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import checksum
from hybridflow.checkpoint.compatibility import _identity, changes, input_checksums
from hybridflow.config.reading.yaml_loader import public_settings
from hybridflow.config.recipe import load_recipe

DPO = Path(__file__).parents[3] / "launch/recipes/algorithms/dpo.yaml"
GOOD, OTHER = (f'{{"prompt": "1+1=", "chosen": "2", "rejected": "{wrong}"}}\n' for wrong in "34")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def checksums(directory: Path, train: str, *overrides: str) -> dict[str, str]:
    (directory / "eval.jsonl").write_text(GOOD)
    files = f"{{train_path: '{directory}/{train}', eval_path: {directory}/eval.jsonl}}"
    pairs = ["data.source=pairs", f"data.pairs={files}"]
    recipe = load_recipe(DPO, [f"run_dir={directory}", *pairs, *overrides])
    return input_checksums(recipe.algorithm.name, recipe.model.path, recipe.data)


def test_a_saved_data_set_is_known_by_what_it_holds(tmp_path: Path) -> None:
    import datasets

    digests = []
    for name, wrong in (("one", "3"), ("same", "3"), ("other", "4")):
        row = {"prompt": "1+1=", "chosen": "2", "rejected": wrong}
        datasets.Dataset.from_list([row]).save_to_disk(tmp_path / name)
        state = tmp_path / name / "state.json"  # has a fingerprint that is drawn
        state.write_text((tmp_path / "one" / "state.json").read_text())
        digests.append(checksums(tmp_path, name)["data.pairs.train_path"])
    assert digests[0] == digests[1] != digests[2]


def test_a_pattern_is_known_by_what_its_files_hold_and_a_file_by_its_own_checksum(tmp_path: Path) -> None:
    by_content = []
    for second in (GOOD, OTHER, GOOD):
        for number, text in enumerate((GOOD, second)):
            (tmp_path / f"part-{number}.jsonl").write_text(text)
        by_content.append(checksums(tmp_path, "part-*.jsonl"))
    assert by_content[0] == by_content[2]
    assert by_content[0]["data.pairs.train_path"] != by_content[1]["data.pairs.train_path"]
    alone = {"data.pairs.eval_path": checksum(tmp_path / "eval.jsonl")}
    assert checksums(tmp_path, "none-*.jsonl") == alone
    assert checksums(tmp_path, "part-1.jsonl") == alone | {"data.pairs.train_path": checksum(tmp_path / "part-1.jsonl")}


def test_a_chat_template_of_pairs_is_known_by_its_text(tmp_path: Path) -> None:
    path, by_text = tmp_path / "own.jinja", []
    (tmp_path / "train.jsonl").write_text(GOOD)
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        path.write_text(text)
        by_text.append(checksums(tmp_path, "train.jsonl", f"data.pairs.chat.template={path}"))
        assert by_text[-1]["data.pairs.chat.template"] == checksum(path)
    assert by_text[0] != by_text[1]


@pytest.mark.parametrize(
    ("group", "earlier", "name"),
    [
        ("train", "one_step_experts", "fused_experts"),
        ("train", "expert_copies", "copy_engine_dispatcher"),
        ("train", "expert_rows_ahead", "predicted_expert_capacity"),
        ("rollout", "lend", "lease"),
        ("rollout", "lend_after_s", "lease_after_s"),
    ],
)
def test_a_checkpoint_is_read_with_names_that_settings_had_before(group: str, earlier: str, name: str) -> None:
    recipe = load_recipe(DPO, [])
    given, saved = public_settings(recipe), public_settings(recipe)
    saved[group][earlier] = saved[group].pop(name)
    assert changes(given, saved) == []
    saved[group][earlier] = "other"
    assert [difference.name for difference in changes(given, saved)] == [f"{group}.{name}"]


@pytest.mark.parametrize("group", ["files", "pairs"])
def test_a_checkpoint_of_conversations_is_read_with_the_name_that_train_on_had_before(group: str) -> None:
    saved = _identity({"data": {group: {"chat": {"learn": "last"}}}})
    assert saved[f"data.{group}.chat.train_on"] == "last"
    assert f"data.{group}.chat.learn" not in saved


def test_a_checkpoint_with_a_layer_that_drafts_is_of_runs_that_train_it() -> None:
    def identity(*overrides: str) -> dict[str, object]:
        engine = "rollout.engine={deterministic: false, draft_tokens: 1}"
        return _identity(public_settings(load_recipe(DPO.parents[1] / "demo.yaml", [engine, *overrides])))

    assert identity() != identity("train.mtp={}") == identity("train.mtp={lr: 0.1}")
    without = public_settings(load_recipe(DPO.parents[1] / "demo.yaml"))
    del without["train"]["mtp"]  # of a run before the layer could be trained
    assert _identity(without) == identity()


def test_a_checkpoint_of_adapters_is_of_their_settings_alone(tmp_path: Path) -> None:
    def identity(*overrides: str) -> dict[str, object]:
        recipe = load_recipe(DPO.parents[1] / "lora.yaml", [f"run_dir={tmp_path}", *overrides])
        return _identity(public_settings(recipe))

    for other in ("train.lora.rank=8", "train.lora.alpha=8", "train.lora.targets=[q_proj]", "train.lora=null"):
        assert identity() != identity(other)
    # Engines may get the same adapters otherwise, also than in a run before there was a choice.
    targets = "train.lora.targets=[q_proj, v_proj]"
    assert identity(targets) == identity(targets, "train.lora.engine=adapter")
    given, saved = (
        public_settings(load_recipe(DPO.parents[1] / "lora.yaml", [targets, *more]))
        for more in (["train.lora.engine=adapter"], [])
    )
    del saved["train"]["lora"]["engine"]
    assert list(map(str, changes(given, saved))) == [
        "train.lora.engine: merged in the checkpoint, adapter in the recipe"
    ]
