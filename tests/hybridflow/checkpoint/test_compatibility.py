"""What a run knows of the files that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine3d.checkpoint.manifest import checksum
from hybridflow.checkpoint.compatibility import input_checksums
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
    return input_checksums(load_recipe(DPO, [f"run_dir={directory}", *pairs, *overrides]))


def test_a_saved_data_set_is_known_by_what_it_holds(tmp_path: Path) -> None:
    import datasets

    found = []
    for name, wrong in (("one", "3"), ("same", "3"), ("other", "4")):
        row = {"prompt": "1+1=", "chosen": "2", "rejected": wrong}
        datasets.Dataset.from_list([row]).save_to_disk(tmp_path / name)
        state = tmp_path / name / "state.json"  # has a fingerprint that is drawn
        state.write_text((tmp_path / "one" / "state.json").read_text())
        found.append(checksums(tmp_path, name)["data.pairs.train_path"])
    assert found[0] == found[1] != found[2]


def test_a_pattern_is_known_by_what_its_files_hold_and_a_file_by_its_own_checksum(tmp_path: Path) -> None:
    found = []
    for second in (GOOD, OTHER, GOOD):
        for number, text in enumerate((GOOD, second)):
            (tmp_path / f"part-{number}.jsonl").write_text(text)
        found.append(checksums(tmp_path, "part-*.jsonl"))
    assert found[0] == found[2]
    assert found[0]["data.pairs.train_path"] != found[1]["data.pairs.train_path"]
    alone = {"data.pairs.eval_path": checksum(tmp_path / "eval.jsonl")}
    assert checksums(tmp_path, "none-*.jsonl") == alone
    assert checksums(tmp_path, "part-1.jsonl") == alone | {"data.pairs.train_path": checksum(tmp_path / "part-1.jsonl")}


def test_a_chat_template_of_pairs_is_known_by_its_text(tmp_path: Path) -> None:
    path, found = tmp_path / "own.jinja", []
    (tmp_path / "train.jsonl").write_text(GOOD)
    for text in ("{{ messages[0].content }}", "{{ messages[-1].content }}"):
        path.write_text(text)
        found.append(checksums(tmp_path, "train.jsonl", f"data.pairs.chat.template={path}"))
        assert found[-1]["data.pairs.chat.template"] == checksum(path)
    assert found[0] != found[1]
