"""Remarks on prompts that are held in memory."""

from __future__ import annotations

from pathlib import Path

from tokenizers.processors import TemplateProcessing

from hybridflow.data.prompts import Prompts
from hybridflow.data.tasks import Example
from hybridflow.data.tokenizer import encode_answers, encode_prompts, make_chat_tokenizer
from hybridflow.planning.data.prompts import memory_notes


def test_special_tokens_of_texts_in_memory_are_reported(tmp_path: Path) -> None:
    tokenizer = make_chat_tokenizer(tmp_path)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    examples = [Example("a", "b"), Example("<bos>a", "b<|end|>"), Example("a", "b<|end|>c")]
    prompts = Prompts(examples, encode_prompts(tokenizer, examples, max_tokens=9))
    answers = encode_answers(tokenizer, examples, max_tokens=9)
    bos = "prompts begin with '<bos>' twice: the text has one, and the tokenizer puts one before it; the first is "
    inner = "have tokens to train on after '<|end|>', where a model stops; the first is prompt 2"
    assert memory_notes(tokenizer, {"training": prompts, "supervised": prompts}, answers) == [
        f"data: 1 training {bos}prompt 1",
        f"data: 1 supervised {bos}prompt 1",
        f"data: 1 supervised prompts {inner}",
    ]
