"""Prompts that are too long, and the cut of messages, which keeps their template complete."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from engine3d.errors import UserError
from hybridflow.data.config import OverlongPolicy
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.files.conversations.chat import ChatTemplate
from hybridflow.data.files.conversations.cutting import Fit, cut_messages


def cut(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], most: int, policy: OverlongPolicy, **chat: Any
) -> str:
    """The text of messages after the cut, which has to fit."""
    template = ChatTemplate(ChatConfig.model_validate(chat), tokenizer)
    tokens = tokenizer(template.prompt(messages, "f:1"), add_special_tokens=False)["input_ids"]
    assert len(tokens) > most
    tokens_left = cut_messages(tokenizer, template, messages, tokens, Fit(1, None, most, policy), "f:1")
    assert 0 < len(tokens_left) <= most
    return str(tokenizer.decode(tokens_left))


@pytest.mark.parametrize(("policy", "left"), [("cut_left", "56789"), ("cut_right", "01234"), ("cut_middle", "01289")])
def test_the_template_stays_whole_where_messages_are_cut(
    chat: PreTrainedTokenizerBase, policy: OverlongPolicy, left: str
) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c" * 12}]
    messages.append({"role": "user", "content": "0123456789"})
    head = f"<|system|>x<|end|><|user|>ab<|end|><|assistant|>{'c' * 12}<|end|><|user|>"
    text = cut(chat, messages, 29, policy, system="x")
    assert text == f"{head}{left}<|end|><|assistant|>"


def test_the_longest_of_user_and_tools_is_cut(chat: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "abc"}, {"role": "tool", "content": "01234567"}]
    assert cut(chat, messages, 10, "cut_right") == "<|user|>abc<|end|><|tool|>01<|end|><|assistant|>"


def test_a_content_of_parts_is_cut_as_the_text_that_it_is(chat: PreTrainedTokenizerBase) -> None:
    content = [{"type": "text", "text": "0123"}, {"type": "text", "text": "4567"}]
    assert cut(chat, [{"role": "user", "content": content}], 8, "cut_right") == "<|user|>01234<|end|><|assistant|>"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cut_left", "cut_right", "cut_middle"])
@pytest.mark.parametrize("text", ["What is the sum " * 9, "\U0001f600\u00e4\u4e2d" * 20, "the\U0001f600answer" * 9])
def test_texts_whose_characters_are_several_tokens(
    bpe: PreTrainedTokenizerBase, policy: OverlongPolicy, text: str
) -> None:
    for most in (15, 16, 17, 24, 40):
        text_left = cut(bpe, [{"role": "user", "content": text}], most, policy)
        assert text_left.startswith("<|im_start|>user\n") and text_left.endswith("<|im_end|>\n<|im_start|>assistant\n")
        inside = text_left.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert "\ufffd" not in inside  # no character is cut in two
        if policy == "cut_left":
            assert text.endswith(inside)
        elif policy == "cut_right":
            assert text.startswith(inside)


def test_no_room_and_nothing_to_cut(chat: PreTrainedTokenizerBase) -> None:
    for most in (1, 3):
        with pytest.raises(UserError) as error:
            cut(chat, [{"role": "user", "content": "0123"}], most, "cut_left")
        assert str(error.value) == (
            f"f:1: without its longest message of the user the prompt leaves no room in {most} tokens; expected "
            "data.overlong_prompts=drop"
        )
    for messages in ([{"role": "system", "content": "0123"}], [{"role": "user", "content": ""}]):
        with pytest.raises(UserError, match="f:1: no message of the user that could be cut; expected data"):
            cut(chat, messages, 2, "cut_left")


def test_why_a_prompt_is_dropped() -> None:
    fit = Fit(3, 10, 6, "drop")
    assert [fit.reason_to_drop(tokens) for tokens in (2, 3, 6, 7, 11)] == [
        "fewer than 3 tokens (min_prompt_tokens)",
        None,
        None,
        "more than 6 tokens (data.overlong_prompts=drop)",
        "more than 10 tokens (max_prompt_tokens)",
    ]
    assert [Fit(1, None, 6, "cut_left").reason_to_drop(tokens) for tokens in (0, 7)] == [None, None]
    assert fit.key_values() == [3, 10, 6, "drop"]
