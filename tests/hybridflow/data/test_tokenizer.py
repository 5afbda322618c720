"""Texts as prompts and as responses: special tokens before them, and what ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridflow.data.config import OverlongPolicy
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import (
    encode_answers,
    encode_prompt,
    encode_prompts,
    encode_prompts_together,
    fit_prompts,
    make_chat_tokenizer,
)


def around(tokenizer: PreTrainedTokenizerBase, processing: str) -> PreTrainedTokenizerBase:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    special = [("<bos>", 1), ("<|end|>", 2), ("<pad>", 0)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(processing, special_tokens=special)
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    return make_chat_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("processing", "before"),
    [("$A", ""), ("$A <|end|>", ""), ("<bos> $A <|end|>", "<bos>"), ("<pad> <bos> $A <|end|> <pad>", "<pad><bos>")],
)
def test_nothing_follows_the_text_of_a_prompt(tokenizer: PreTrainedTokenizerBase, processing: str, before: str) -> None:
    around(tokenizer, processing)
    texts = ["1+1=", "<bos>", "<|user|>a<|end|>", "<|end|>", "b"]  # special tokens of a text are its own
    expected = [before + text for text in texts]
    assert [tokenizer.decode(tokens) for tokens in encode_prompts_together(tokenizer, texts)] == expected
    assert [tokenizer.decode(encode_prompt(tokenizer, text, "x")) for text in texts] == expected
    examples = [Example(text, "") for text in texts]
    assert [tokenizer.decode(tokens) for tokens in encode_prompts(tokenizer, examples, max_tokens=99)] == expected


@pytest.mark.parametrize(
    ("policy", "text"), [("cut_left", "<bos>2+3="), ("cut_right", "<bos>10+2"), ("cut_middle", "<bos>103=")]
)
def test_a_prompt_that_is_cut_ends_with_its_text_as_well(
    tokenizer: PreTrainedTokenizerBase, policy: OverlongPolicy, text: str
) -> None:
    around(tokenizer, "<bos> $A <|end|>")
    _, [tokens], _ = fit_prompts(tokenizer, [Example("10+2+3=", "")], max_tokens=5, policy=policy)
    assert tokenizer.decode(tokens) == text


def test_a_text_without_tokens_has_no_special_ones_either(tokenizer: PreTrainedTokenizerBase) -> None:
    around(tokenizer, "<bos> $A <|end|>")
    assert encode_prompts_together(tokenizer, ["", ""]) == [[], []]
    assert [len(tokens) for tokens in encode_prompts_together(tokenizer, ["1", "", "12"])] == [2, 0, 3]


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("2", "2<|end|>"),
        ("2<|end|>", "2<|end|>"),
        ("2<|end|>\n", "2<|end|>"),
        ("2\n<|end|><|end|>\n <|end|>", "2\n<|end|>"),
        (" 2 ", " 2 <|end|>"),
        ("2<|end|><|user|>b", "2<|end|><|user|>b<|end|>"),
        ("", "<|end|>"),
    ],
)
def test_a_response_has_one_end(tokenizer: PreTrainedTokenizerBase, answer: str, response: str) -> None:
    around(tokenizer, "<bos> $A <|end|>")
    [tokens] = encode_answers(tokenizer, [Example("1+1=", answer)], max_tokens=99)
    assert tokenizer.decode(tokens) == response
