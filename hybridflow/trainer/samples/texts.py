"""Texts of some samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.data.tasks import Example
from hybridflow.metrics.sinks.sample_file import SampleText

_CHARACTERS = 1000
"""Most characters of an answer in the store."""


def sample_texts(
    batch: RemoteBatch,
    rewards: Tensor,
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    characters: int,
) -> list[SampleText]:
    """Some samples of a batch, evenly from the whole of it; nothing but their tokens is fetched.

    Args:
        batch: whose responses are there.
        rewards: (B,).
        examples: that the prompt indices count.
        tokenizer: decodes prompts and responses, without special tokens.
        count: of samples, at most.
        characters: of each text, at most.
    """
    count = min(count, len(batch))
    if not count:
        return []
    rows = [number * len(batch) // count for number in range(count)]
    few = batch.as_generated().select(rows).fetch()
    prompts = tokenizer.batch_decode(few.prompts(), skip_special_tokens=True)
    responses = tokenizer.batch_decode(few.responses(), skip_special_tokens=True)
    return [
        SampleText(
            prompt=shortened(prompt, characters),
            response=shortened(response, characters),
            answer=short_answer(examples[index].answer, characters),
            reward=float(rewards[row]),
            version=version,
            sample=sample,
            row=examples[index].identity,
        )
        for row, prompt, response, index, version, sample in zip(
            rows,
            prompts,
            responses,
            few.prompt_indices.tolist(),
            few.policy_versions.tolist(),
            few.sample_ids.tolist(),
            strict=True,
        )
    ]


def shortened(text: str, characters: int) -> str:
    """The beginning and the end of a text of more characters, and how many lie between them."""
    if len(text) <= characters:
        return text
    head, tail = characters - characters // 2, characters // 2
    return f"{text[:head]} [... {len(text) - characters:,} characters ...] {text[len(text) - tail :]}"


def answer_texts(examples: Mapping[int, Example]) -> dict[int, str]:
    """The reference answers of prompts as texts, by the indices of the prompts; none of those without one."""
    answers = {index: short_answer(example.answer, _CHARACTERS) for index, example in examples.items()}
    return {
        index: answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
        for index, answer in answers.items()
        if answer is not None
    }


def short_answer(answer: Any, characters: int) -> Any:
    """The answer as it is where it is short; else the beginning and end of its text."""
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    return answer if len(text) <= characters else shortened(text, characters)
