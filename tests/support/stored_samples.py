"""Samples as a step learns from them, and a sample store that holds some, without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_table import ByName
from hybridflow.data.tokenizer import make_character_tokenizer
from hybridflow.rundir.file_names import SAMPLE_STORE
from hybridflow.rundir.samples.files import replacing, sample_file
from hybridflow.trainer.samples.store import TrainedSamples, write_samples

CHARACTERS = "0123456789+= abcdef\n\x1b"


@dataclass
class LocalBatch:
    """Stand-in for a `RemoteBatch`, with as much of it as the store uses. Its tokens are in this process."""

    samples: SampleBatch
    per_sample: dict[str, Tensor]
    fetched: list[int]
    """Tokens of each fetch."""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> Tensor:
        return self.samples.sequence_lengths

    def as_generated(self) -> LocalBatch:
        return self

    def select(self, rows: Tensor) -> LocalBatch:
        per_sample = {name: column[rows] for name, column in self.per_sample.items()}
        return LocalBatch(self.samples.select(rows), per_sample, self.fetched)

    def fetch(self) -> SampleBatch:
        self.fetched.append(int(self.lengths.sum()))
        return self.samples


def encoded(text: str) -> list[int]:
    """Encode as the tokenizer of `make_run` does, with an end of sequence."""
    return [*(3 + CHARACTERS.index(character) for character in text), 2]


def samples_of(
    texts: Sequence[tuple[str, str]], rewards: Sequence[float], *, first: int = 0, group: int = 4, **columns: Any
) -> SampleBatch:
    """Samples of prompts and responses, `group` of each group."""
    responses = [encoded(response) for _, response in texts]
    ids = range(first, first + len(texts))
    batch = SampleBatch.from_generations(
        prompts=[encoded(prompt)[:-1] for prompt, _ in texts],
        responses=responses,
        logprobs=[[-(0.1 + sample)] * len(response) for sample, response in zip(ids, responses, strict=True)],
        sample_ids=list(ids),
        group_ids=[sample // group for sample in ids],
        prompt_indices=[7 + sample // group for sample in ids],
        policy_versions=[3] * len(texts),
        finish_reasons=["length" if sample % 2 else "stop" for sample in ids],
        engine=1,
        times=[(100.0, 100.0 + sample) for sample in ids],
    )
    return batch.replace(rewards=torch.tensor(rewards), **columns)


def learned_from(
    step: int, batch: SampleBatch, by_name: Mapping[str, ByName] | None = None, **per_sample: Tensor
) -> TrainedSamples:
    """Samples that a step was trained on."""
    per_sample |= {"sample_ids": batch.sample_ids, "group_ids": batch.group_ids}
    local: Any = LocalBatch(batch, per_sample, [])
    return TrainedSamples(step, step + 1, (local,), by_name or {})


def store(run: Path, learned: TrainedSamples) -> Path:
    """Write a step's samples into a run's store."""
    path = sample_file(run / SAMPLE_STORE, learned.step)
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        write_samples(file, learned)
    return path


def make_run(run: Path) -> Path:
    """A run's directory with a tokenizer and three steps of two groups of four samples."""
    make_character_tokenizer(CHARACTERS, run / "initial")
    (run / "recipe.yaml").write_text("name: small\n")
    for step in (1, 2, 3):
        texts = [(f"{group}+{step}=", f"{group + step} {'abcd'[index]}") for group in (0, 1) for index in range(4)]
        rewards = [0.25, 1.0, -0.5, 0.0, 2.0, 0.5, 0.5, float(-step)]
        batch = samples_of(texts, rewards, first=8 * step)
        by_name = {
            "reward/exact": ByName(batch.sample_ids, torch.tensor(rewards) / 2),
            "reward/model": ByName(batch.sample_ids[:4], torch.tensor(rewards[:4])),
        }
        store(run, learned_from(step, batch, by_name, advantages=torch.tensor(rewards) - 0.125))
    return run
