"""Texts as prompts and as responses: special tokens before them, and what ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hybridflow.data.config import OverlongPolicy
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import (
    encode_answers,
    encode_continuation,
    encode_prompt,
    encode_prompts,
    encode_prompts_together,
    encode_text,
    fit_prompts,
    make_chat_tokenizer,
    without_end_of,
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


def sentencepiece_like(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None
) -> PreTrainedTokenizerBase:
    """A tokenizer of letters with SentencePiece's blank before words, and the end of a line as a byte."""
    tokens = ["<unk>", "</s>", "<0x0A>", "▁", *"abc", "▁a", "▁b", "ab", "▁ab"]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [
        (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
        (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        (None, pre_tokenizers.Metaspace(prepend_scheme="always", split=False)),
    ],
)
def test_no_blank_stands_between_a_text_and_its_continuation(
    normalizer: normalizers.Normalizer | None, pre_tokenizer: pre_tokenizers.PreTokenizer | None
) -> None:
    tokenizer = sentencepiece_like(normalizer, pre_tokenizer)
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "ab", "")) == ["▁ab"]
    for text, tokens in (("ab", ["ab"]), (" ab c", ["▁ab", "▁", "c"]), ("", []), ("\nb", ["<0x0A>", "b"])):
        following = encode_continuation(tokenizer, text, "")
        assert tokenizer.convert_ids_to_tokens(following) == tokens
        together = encode_text(tokenizer, "c" + text, "")
        assert [*encode_text(tokenizer, "c", ""), *following] == together
    (answer,) = encode_answers(tokenizer, [Example(prompt="c", answer="ab")], max_tokens=4)
    assert tokenizer.convert_ids_to_tokens(answer) == ["ab", "</s>"]


def test_a_continuation_is_encoded_as_a_text_where_no_blank_is_put_before_texts(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert encode_continuation(tokenizer, " 1+1", "") == encode_text(tokenizer, " 1+1", "")


def test_the_end_that_a_turn_has_is_not_repeated(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    blank, one, two = (encode_text(tokenizer, text, "") for text in (" ", "1", "2"))
    turn = [*one, end]
    for before in ([], blank, blank * 2):
        assert without_end_of(turn, [*before, end, *two], tokenizer) == two
    for kept in ([*two, end], blank, []):
        assert without_end_of(turn, kept, tokenizer) == kept
    assert without_end_of(one, [*blank, end, *two], tokenizer) == [*blank, end, *two]  # which its limit has cut
    assert without_end_of(one, [*blank, *one], tokenizer) == [*blank, *one]
