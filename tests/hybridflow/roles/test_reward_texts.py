"""The texts that reward functions get: with and without the tokenizer's special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.cli.main import main
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import make_chat_tokenizer, response_texts, special_tokens
from hybridflow.rewards.config import RewardConfig
from hybridflow.roles.reward import FunctionRewardWorker
from tests.support.resumable import DEMO

KEEPING = """
def reward(generated_texts):
    return [float(text == "<|tool|>42<|end|>1") for text in generated_texts]
"""
RESPONSES = ["<|tool|>42<|end|>1<|end|>", "<|tool|>42<|end|>1<|end|><pad><pad>", "<|tool|>42<|end|>1", "421<|end|>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chat")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(directory)


def encoded(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in RESPONSES]


def test_special_tokens_are_those_that_decoding_removes(tokenizer: PreTrainedTokenizerBase) -> None:
    assert set(special_tokens(tokenizer)) >= {"<|tool|>", "<|end|>", "<pad>", "<bos>"}
    for token in special_tokens(tokenizer):
        tokens = tokenizer(f"a{token}b", add_special_tokens=False)["input_ids"]
        assert response_texts(tokenizer, [tokens], keep_special_tokens=False) == ["ab"]
        assert response_texts(tokenizer, [tokens], keep_special_tokens=True) == [f"a{token}b"]


def test_only_the_tokens_that_end_a_response_are_never_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = response_texts(tokenizer, encoded(tokenizer), keep_special_tokens=True)
    assert texts == ["<|tool|>42<|end|>1"] * 3 + ["421"]
    assert response_texts(tokenizer, encoded(tokenizer), keep_special_tokens=False) == ["421"] * 4


def test_each_function_gets_the_texts_that_it_asks_for(
    tmp_path: Path, directory: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(KEEPING)
    local = {"name": "own", "path": f"{tmp_path}/own.py:reward", "special_tokens": "keep"}
    full = {"name": "whole", "path": "arithmetic"}
    kept = {"name": "kept", "path": "arithmetic", "special_tokens": "keep"}
    config = RewardConfig.model_validate({"functions": [local, full, kept]})
    responses = encoded(tokenizer)
    batch = SampleBatch.from_generations(
        prompts=[[4]] * 4,
        responses=responses,
        logprobs=[[-1.0] * len(response) for response in responses],
        sample_ids=[1, 2, 3, 4],
        group_ids=[0] * 4,
        prompt_indices=[0] * 4,
        policy_versions=[1] * 4,
        finish_reasons=["stop"] * 4,
    )
    worker = FunctionRewardWorker(None, {"reward": config}, directory, (), tmp_path)  # type: ignore[arg-type]
    try:
        worker.start()
        columns = worker.score(batch, examples={0: Example("1", "421")}, what="reward")
        assert columns is not None
        per_sample = columns.per_sample
    finally:
        worker.shutdown()
    assert per_sample["value/own"].tolist() == [1, 1, 1, 0]
    assert per_sample["value/whole"].tolist() == [1, 1, 1, 1]
    assert per_sample["value/kept"].tolist() == [0, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [{"pattern": r"\d+<eos>"}, {"pattern": r"[0-9]*\<bos\>.*"}],  # tokens of the built-in tokenizer
)
def test_a_pattern_with_a_special_token_is_refused(
    arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    function = {"name": "form", "path": "matches", "arguments": arguments}
    assert main(["check", str(DEMO), f"reward.functions={json.dumps([function])}"]) == 2
    error = capsys.readouterr().err
    assert "reward 'form' looks for '<" in error and "expected special_tokens: keep" in error
    function["special_tokens"] = "keep"
    assert main(["check", str(DEMO), f"reward.functions={json.dumps([function])}"]) == 0


def test_tags_that_are_special_tokens_are_looked_for() -> None:
    tag = {"name": "m", "path": "math", "arguments": {"extract": "tag"}}
    boxed = {"name": "n", "path": "math"}
    functions = RewardConfig.model_validate({"functions": [tag, boxed]}).functions
    tokens = ["<s>", "<answer>", "</answer>"]
    assert [function.token_looked_for(tokens) for function in functions] == ["<answer>", None]
    assert functions[0].token_looked_for(["</answer>"]) == "</answer>"
    assert functions[0].token_looked_for(["<think>"]) is None
