"""Settings of the data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from engine3d.settings import AbsolutePath, Settings
from hybridflow.data.files.config import ChatConfig, FilesConfig

OverlongPolicy = Literal["refuse", "drop", "cut_left", "cut_right", "cut_middle"]
SameResponses = Literal["refuse", "drop"]
Operator = Literal["+", "-", "*"]

MOST_EXAMPLES = 1_000_000
"""Largest number of examples of the built-in task, which are made in memory."""


class ArithmeticConfig(Settings):
    """The arithmetic task: every problem `a<op>b=` with both operands in the range is one of its problem space."""

    operators: tuple[Operator, ...] = ("+",)
    """Operators of the problems."""
    smallest_operand: int = Field(default=0, ge=0, le=10**9)
    """Smallest operand of a problem."""
    largest_operand: int = Field(default=99, ge=0, le=10**9)
    """Largest operand of a problem."""
    seed: int = 0
    """Seed of the problems in each split."""
    eval_size: int = Field(default=256, ge=1, le=MOST_EXAMPLES)
    """Held-out problems."""
    sft_size: int = Field(default=1024, ge=0, le=MOST_EXAMPLES)
    """Supervised examples, for `warmup`."""
    train_size: int = Field(default=2048, ge=1, le=MOST_EXAMPLES)
    """Training prompts."""
    sft_wrong: float = Field(default=0.0, ge=0, lt=1)
    """Share of the supervised examples whose answer is wrong, by one or by ten: demonstrations with errors."""

    @property
    def problems(self) -> int:
        """Size of the problem space."""
        return len(self.operators) * (self.largest_operand - self.smallest_operand + 1) ** 2

    @model_validator(mode="after")
    def _check(self) -> ArithmeticConfig:
        if not self.operators or len(set(self.operators)) != len(self.operators):
            raise ValueError(f"operators are {list(self.operators)}, expected at least one, each once")
        if self.largest_operand < self.smallest_operand:
            raise ValueError(f"largest_operand is {self.largest_operand}, expected at least {self.smallest_operand}")
        requested = self.eval_size + self.sft_size + self.train_size
        if requested > self.problems:
            raise ValueError(
                f"eval_size + sft_size + train_size is {requested}, expected at most the {self.problems} problems "
                f"of {len(self.operators)} operators and operands {self.smallest_operand} to {self.largest_operand}"
            )
        return self


class JsonlConfig(Settings):
    """Prompts from files of one JSON object a line."""

    train_path: AbsolutePath
    """File of the training prompts."""
    eval_path: AbsolutePath
    """File of the held-out prompts."""
    sft_path: AbsolutePath | None = None
    """File of the supervised examples, for `warmup`."""
    prompt_field: str = "prompt"
    """Field of a line that holds the prompt."""
    answer_field: str | None = "answer"
    """Field that reward functions get as `answers`: strings and whole numbers as text, all other JSON as it is. Null
    where they need none. Supervised examples always need it, as text. A function that has a parameter of the name of
    any field of the lines gets a list of that field's values, null where a line lacks it.
    """

    @model_validator(mode="after")
    def _check(self) -> JsonlConfig:
        if self.sft_path is not None and self.answer_field is None:
            raise ValueError("answer_field is null with sft_path set, expected the field of the supervised answers")
        return self


class PairsConfig(Settings):
    """Prompts with responses of which some are better, from files of rows in any format that `data.files` reads, to
    train on without engines. Each column holds a text, a list of token ids, or a list of messages, which the chat
    template renders; a text as response ends with the end-of-sequence token. A response of messages may begin with
    those of the prompt."""

    train_path: AbsolutePath
    """File of the pairs to train on."""
    eval_path: AbsolutePath
    """File of the held-out pairs."""
    sft_path: AbsolutePath | None = None
    """File of the supervised examples, for `warmup`: texts, of which the better response is trained on."""
    prompt_field: str | None = "prompt"
    """Column that holds the prompt; null where both responses are conversations, whose common beginning it is."""
    chosen_field: str = "chosen"
    """Field of the better response. With kto a line may have only this one, of a desirable response."""
    rejected_field: str = "rejected"
    """Field of the worse response. With kto a line may have only this one, of an undesirable response."""
    tools_field: str | None = None
    """Column of the tools that the template describes to the model, as `tools` of `data.files.train`; those of
    `chat.tools` if null."""
    chat: ChatConfig = ChatConfig()
    same_responses: SameResponses = "refuse"
    """Treatment of a pair whose responses are the same tokens: "refuse" the recipe, or "drop" the pair. Their number is
    logged.
    """

    @model_validator(mode="after")
    def _check(self) -> PairsConfig:
        if self.chat.texts != "raw":
            raise ValueError(f"chat.texts={self.chat.texts}, where a text is an unchanged prompt; expected raw")
        if self.chat.train_on != "all":
            raise ValueError(f"chat.train_on={self.chat.train_on}, where the responses are trained on; expected none")
        if self.sft_path is not None and self.prompt_field is None:
            raise ValueError("prompt_field is null with sft_path set, expected the column of the supervised prompts")
        return self


class DataConfig(Settings):
    """Source of the prompts, and the order in which they are drawn."""

    source: Literal["arithmetic", "files", "jsonl", "pairs"] = "arithmetic"
    """`arithmetic`, the built-in task; `files`, rows of JSON, CSV, Parquet or Arrow, of any size, as texts or messages;
    `jsonl`, files of one JSON object a line, read into memory; or `pairs`, such files of prompts with responses, for an
    algorithm that trains on these. Pairs of the built-in task have a right and a wrong answer."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    files: FilesConfig | None = None
    jsonl: JsonlConfig | None = None
    pairs: PairsConfig | None = None
    seed: int = 0
    """Seed of the order of the training prompts, added to the run's seed."""
    overlong_prompts: OverlongPolicy = "refuse"
    """Treatment of a prompt, of any split, that leaves no room for the longest response: "refuse" the recipe, "drop"
    the prompt, or cut its first tokens ("cut_left"), its last ("cut_right") or those between its halves ("cut_middle").
    Their number is logged. Reward functions get the complete prompt.
    """

    @property
    def holds_out_prompts(self) -> bool:
        """True if a part of the data is held out, for the set `eval` of `evaluation`."""
        return self.source != "files"

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        for name, files in (("files", self.files), ("jsonl", self.jsonl), ("pairs", self.pairs)):
            if (self.source == name) != (files is not None):
                raise ValueError(
                    f"{name} is {'missing' if files is None else 'given'} with source {self.source!r}, "
                    f"expected it with source {name!r} and with no other"
                )
        return self
