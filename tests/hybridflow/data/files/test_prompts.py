"""Prompts whose token ids and rows lie in files, here and in another process."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from hybridflow.data.files.prompts import FilePrompts
from hybridflow.data.packed_prompts import PackedPrompts
from hybridflow.data.prompts import text_hash
from hybridflow.data.tasks import Example

from .tokenizers import read_prompts


@pytest.fixture
def prompts(tmp_path: Path, chat: PreTrainedTokenizerBase) -> FilePrompts:
    for name, count in (("a", 5), ("none", 3), ("b", 2)):
        rows = [{"prompt": f"{name}{n}", "answer": n, "extra": {"n": [n]}} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    paths = [{"path": str(tmp_path / f"{name}.jsonl")} for name in ("a", "none", "b")]
    paths[1]["where"] = {"answer": {"min": 9}}  # type: ignore[assignment]
    return read_prompts(chat, tmp_path / "cache", *paths)


def test_examples_are_the_rows_of_their_sources(prompts: FilePrompts) -> None:
    assert len(prompts) == len(prompts.examples) == len(prompts.tokens) == 7
    assert [(span.begin, span.end) for span in prompts.spans] == [(0, 5), (5, 5), (5, 7)]
    names = ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]
    assert [example.prompt for example in prompts.examples] == names
    assert prompts.examples[5] == Example("b0", "0", {"prompt": "b0", "answer": 0, "extra": {"n": [0]}}, identity="b:0")
    assert prompts.at([6, 1, 6]) == {6: prompts.examples[6], 1: prompts.examples[1]}
    assert prompts.text_hashes().tolist() == [text_hash(name) for name in names]
    assert (prompts.fields(), list(prompts.answers())) == (("prompt", "answer", "extra"), [])
    for index in (-1, 7):
        with pytest.raises(IndexError):
            prompts.examples[index]
        with pytest.raises(IndexError):
            prompts.tokens[index]


def _read(pickled: Path, output: Path) -> None:
    examples, tokens = pickle.loads(pickled.read_bytes())
    output.write_bytes(pickle.dumps((list(examples), list(tokens))))


def test_another_process_reads_the_same_files(prompts: FilePrompts, tmp_path: Path) -> None:
    data = pickle.dumps((prompts.examples, prompts.tokens))
    assert len(data) < 12_000  # where they lie, not what they are
    (tmp_path / "pickled").write_bytes(data)
    # Forked: a new interpreter would import for ten seconds.
    process = multiprocessing.get_context("fork").Process(target=_read, args=(tmp_path / "pickled", tmp_path / "found"))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == 0
    assert pickle.loads((tmp_path / "found").read_bytes()) == (list(prompts.examples), list(prompts.tokens))


def test_pickled_prompts_are_the_same_here(prompts: FilePrompts) -> None:
    again = pickle.loads(pickle.dumps(prompts))
    assert list(again.examples) == list(prompts.examples)
    assert list(again.tokens) == list(prompts.tokens)
    assert again.spans == prompts.spans


def test_packed_prompts_in_memory_and_in_files(tmp_path: Path) -> None:
    lists: list[list[int]] = [[1, 2, 3], [4], [5, 6]]
    packed = PackedPrompts.of(lists)
    packed.tokens.tofile(tmp_path / "tokens.bin")
    packed.ends.tofile(tmp_path / "ends.bin")
    for prompts in (packed, PackedPrompts.mapped(tmp_path), pickle.loads(pickle.dumps(packed))):
        read: Any = prompts
        assert list(read) == lists
        assert read.lengths().tolist() == [3, 1, 2] == [read.length(index) for index in range(3)]
        assert [read.first_above(largest) for largest in (6, 5, 3, 0)] == [None, (2, 6), (1, 4), (0, 1)]
        assert PackedPrompts.of(read) is read
    assert type(PackedPrompts.mapped(tmp_path).tokens) is np.ndarray
    for name in ("tokens.bin", "ends.bin"):
        (tmp_path / name).write_bytes(b"")
    assert len(PackedPrompts.mapped(tmp_path)) == 0 == len(PackedPrompts.of([]))
