"""Workloads of the comparison: prompts and responses of given lengths, the same for both systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.response_lengths import LONGEST, Lengths
from benchmarks.step import prompts
from engine3d.models import ModelSpec
from engine3d.training.flops import PASSES_OF_AN_UPDATE, sequence_flops
from hybridflow.data.sampler import PromptSampler

_KINDS = 16
_BETWEEN = 8
"""Tokens between the lengths of two kinds of prompts."""
_RECIPES = Path(__file__).resolve().parents[2] / "launch/recipes"


@dataclass(frozen=True)
class Workload:
    """Prompts of a step and their lengths.

    Args:
        description: next to the table.
        prompts: of a step.
        samples: of a prompt, all of one length.
        lengths: tokens of a prompt and of its responses, by rising tokens of the prompt. A step has as many prompts of
            each.
        model: recipe and overrides of the model.
        micro_batch: tokens of a micro-batch.
        cpu: True if it runs on a CPU.
    """

    description: str
    prompts: int
    samples: int
    lengths: tuple[tuple[int, int], ...]
    model: tuple[str, ...] = (f"{_RECIPES}/qwen3-30b-a3b-4xh200.yaml", "model.create.config.num_hidden_layers=8")
    micro_batch: int = 16384
    cpu: bool = False

    def __post_init__(self) -> None:
        if self.prompts % len(self.lengths):
            raise ValueError(f"{self.prompts} prompts of {len(self.lengths)} lengths: expected a multiple")

    @property
    def requests(self) -> int:
        """Responses of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Tokens of a step's prompts and responses; a prompt counts once for each of its responses."""
        return sum(prompt + response for prompt, response in self.lengths) * self.requests // len(self.lengths)

    @property
    def response_tokens(self) -> float:
        """Tokens of a response, mean."""
        return sum(response for _, response in self.lengths) / len(self.lengths)

    def update_flops(self, spec: ModelSpec) -> float:
        """Model FLOPs of a step's update (`engine3d/training/flops.py`)."""
        lengths = [prompt + response for prompt, response in self.lengths]
        return PASSES_OF_AN_UPDATE * float(sequence_flops(spec, lengths).mean()) * self.requests

    def settings(self) -> dict[str, object]:
        """Values of the names in `variants.yaml`."""
        rows = ", ".join(f"{{prompt_tokens: {prompt}, max_new_tokens: {tokens}}}" for prompt, tokens in self.lengths)
        return {
            "prompts": self.prompts,
            "samples": self.samples,
            "requests": self.requests,
            "sampling": f"[{rows}]",
            "longest_prompt": max(prompt for prompt, _ in self.lengths),
            "shortest_response": min(response for _, response in self.lengths),
            "longest_response": max(response for _, response in self.lengths),
            "context": max(prompt + response for prompt, response in self.lengths) + 16,
            "cache_tokens": self.tokens + 64 * self.requests,
            "micro_batch": self.micro_batch,
        }


def _kinds(shortest: int, responses: Sequence[int]) -> tuple[tuple[int, int], ...]:
    return tuple((shortest + _BETWEEN * kind, tokens) for kind, tokens in enumerate(responses))


def _long_tail(longest: int) -> list[int]:
    """Response lengths of published mathematics (`response_lengths.py`), brought to `longest` tokens at most."""
    lengths = Lengths("math", seed=1)
    scaled = [max(2, round(lengths.at((kind + 0.5) / _KINDS) * longest / LONGEST)) for kind in range(_KINDS - 1)]
    return [*scaled, longest]


def _nemo_rl() -> tuple[tuple[int, int], ...]:
    """Sequences of up to 4,096 tokens, 3.2 k in the mean: half of them at the limit, the others spread evenly."""
    sequences = [1184 + 320 * kind for kind in range(_KINDS // 2)] + [4096] * (_KINDS // 2)
    return tuple((136 + _BETWEEN * kind, tokens - 136 - _BETWEEN * kind) for kind, tokens in enumerate(sequences))


WORKLOADS = {
    "fixed": Workload("64 x 8 samples of 1,024 + 1,024 tokens", 64, 8, ((1024, 1024),)),
    "long-tail": Workload(
        "64 x 8 samples, prompts of 904 to 1,024 tokens, responses of published lengths scaled to 8,192 tokens at most",
        64,
        8,
        _kinds(904, _long_tail(8192)),
    ),
    "nemo-rl": Workload(
        "16 x 32 samples of up to 4,096 tokens, 3,200 in the mean: a quarter of NeMo-RL's 64 x 32. It publishes the "
        "mean and the limit. Half of these samples are at the limit",
        16,
        32,
        _nemo_rl(),
    ),
    "dry-run": Workload(
        "4 x 2 samples of a model of the demo's size on a CPU: a test of this program",
        4,
        2,
        ((12, 4), (20, 8)),
        model=(
            f"{_RECIPES}/demo.yaml",
            "model.create.config.vocab_size=128",
            "model.create.tokenizer=chat",
            "model.create.config.max_position_embeddings=128",
        ),
        micro_batch=128,
        cpu=True,
    ),
}


def write_prompts(directory: Path, workload: Workload, steps: int, *, order_seed: int, alphabet: str) -> None:
    """Write the prompts of a run as `ours.jsonl` and `verl.jsonl`.

    verl reads its file in order. Lines of the other are in the order in which this project draws them, so that a step
    of either system has the same prompts.

    Args:
        directory: for both files.
        workload: whose prompts they are.
        steps: of the run.
        order_seed: of the recipe (`Recipe.order_seed`).
        alphabet: characters that are a token each.
    """
    count = steps * workload.prompts
    rows = []
    for number in range(count):
        tokens, response = workload.lengths[number % len(workload.lengths)]
        (example,) = prompts(1, tokens, seed=f"beside verl {number}", alphabet=alphabet)
        rows.append(
            {
                "prompt": example.prompt,
                "answer": example.answer,
                "messages": [{"role": "user", "content": example.prompt}],
                "data_source": "sum",
                "reward_model": {"style": "rule", "ground_truth": example.answer},
                "extra_info": {"index": number, "split": "train", "max_new_tokens": response},
            }
        )
    drawn = [rows[0]] * count
    for number, index in enumerate(PromptSampler(count, order_seed).next(count)):
        drawn[index] = rows[number]
    for name, lines in (("verl", rows), ("ours", drawn)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
