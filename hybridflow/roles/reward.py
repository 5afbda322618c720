"""Reward functions, as a role of the dataflow: texts and answers are looked at where the tokens are fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import Row, gathered
from hybridflow.batch.worker_output import Columns
from hybridflow.data.tasks import Example
from hybridflow.rewards.config import MOST_AT_ONCE, JudgeServers, RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import RewardResult, SampleScore, by_sample
from hybridflow.rewards.votes import votes
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.future import Future
from hybridflow.workers.protocols import DP_PROTO, ONE_TO_ALL, register

_TOTAL, _DROPPED, _VALUE, _FAILED, _FIGURE, _COUNT = "total", "dropped", "value/", "failed/", "figure/", "count/"
_VOTE = "vote"
_OF_TRAINING = ("reward", "cost")


class FunctionRewardWorker:
    """Calls every function of rewards, or of costs, with its part of a batch.

    Args:
        context: the rank.
        configs: the functions, by what they are for: "reward", "cost", and those of sets by `PlannedSet.scorer`.
        tokenizer: directory of the tokenizer that turns responses into texts.
        fields: names of what the data have beside prompts and answers, which functions may ask for.
        directory: from which paths of functions are looked for.

    Raises:
        UserError: the directory is not there on this node.
    """

    threads_beside = MOST_AT_ONCE
    """For a stream, whose responses are scored as they end."""

    def __init__(
        self,
        context: WorkerContext,
        configs: Mapping[str, RewardConfig],
        tokenizer: Path,
        fields: Sequence[str],
        directory: Path,
    ) -> None:
        if not directory.is_dir():
            raise UserError(f"reward functions are looked for from {directory}, which is not there on its node")
        os.chdir(directory)
        self._fields = tuple(fields)
        self._configs, self._of_training = configs, [what for what in _OF_TRAINING if what in configs]
        self._make_functions()
        self._tokenizer_directory = tokenizer

    def _make_functions(self) -> None:
        self._functions = {what: RewardFunctions(config, self._fields) for what, config in self._configs.items()}

    @register(ONE_TO_ALL)
    def start(self, *, judge: JudgeServers | None = None, judge_key: str = "") -> None:
        """Load the tokenizer and import every function.

        Args:
            judge: whom functions ask that ask the recipe's judge.
            judge_key: that they bring.
        """
        if judge is not None:
            os.environ[judge.key_variable] = judge_key
            self._configs = {what: config.served_by(judge) for what, config in self._configs.items()}
            self._make_functions()
        with quick_imports():  # slow all the same: roles that start after this one do not wait for it
            from hybridflow.data.tokenizer import load_tokenizer

        for functions in self._functions.values():
            functions.load()
        self._tokenizer = load_tokenizer(self._tokenizer_directory)

    @register(DP_PROTO)
    def score(self, batch: SampleBatch, *, examples: Mapping[int, Example], what: str = "reward") -> Columns:
        """The rewards (or costs) of responses, which `reward_result` reads.

        Failures go into this rank's log too, by the id of their sample. A function may fail on all of its part: whether
        enough came of a step is the caller's to see, by `check_given`.

        Args:
            batch: this rank's part.
            examples: the prompts and answers, by the batch's prompt indices.
            what: "reward" or "cost".
        """
        return self._columns(batch, examples, what)

    @register(DP_PROTO)
    def score_set(self, batch: SampleBatch, *, examples: Mapping[int, Example], what: str) -> Columns:
        """As `score`, of a set of `evaluation`; also the votes of its responses, which `set_votes` reads."""
        columns = self._columns(batch, examples, what)
        config = self._configs[what]
        texts = self._texts(batch, keep_special_tokens=any(each.votes_with_special_tokens for each in config.functions))
        votes_cast = torch.tensor(votes(texts, config), dtype=torch.int64)
        return replace(columns, facts=columns.facts | {_VOTE: votes_cast})

    def _columns(self, batch: SampleBatch, examples: Mapping[int, Example], what: str) -> Columns:
        result = self._evaluated(batch, examples, what)
        facts = {_TOTAL: result.total, _DROPPED: result.dropped}
        facts |= {f"{_VALUE}{name}": column for name, column in result.by_name.items()}
        facts |= {f"{_FAILED}{name}": mask for name, mask in result.failed.items()}
        facts |= {f"{_FIGURE}{name}": column for name, column in result.figures.items()}
        facts |= {f"{_COUNT}{name}": column for name, column in result.counts.items()}
        return Columns(facts=facts, note=result.failures)

    def score_rows(self, rows: Sequence[Row], examples: Mapping[int, Example]) -> list[dict[str, SampleScore]]:
        """What each function of rewards and of costs gives samples of a stream, by what it is for; as `score`."""
        batch = gathered(rows).fetch()
        found = {what: by_sample(self._evaluated(batch, examples, what)) for what in self._of_training}
        return [{what: scores[row] for what, scores in found.items()} for row in range(len(rows))]

    def _evaluated(self, batch: SampleBatch, by_index: Mapping[int, Example], what: str) -> RewardResult:
        texts = self._texts(batch, keep_special_tokens=False)
        keeps = any(function.special_tokens == "keep" for function in self._configs[what].functions)
        examples = [by_index[index] for index in batch.prompt_indices.tolist()]
        result = self._functions[what].evaluate(
            texts,
            [example.prompt for example in examples],
            [example.answer for example in examples],
            {name: [example.fields.get(name) for example in examples] for name in self._fields},
            unstripped=self._texts(batch, keep_special_tokens=True) if keeps else None,
            sources=[example.identity.partition(":")[0] for example in examples],
            whole=False,
        )
        for failure in result.failures:
            print(f"sample {int(batch.sample_ids[failure.sample])}: {failure}")
        return result

    def _texts(self, batch: SampleBatch, *, keep_special_tokens: bool) -> list[str]:
        from hybridflow.data.tokenizer import response_texts

        return response_texts(self._tokenizer, batch.responses(), keep_special_tokens=keep_special_tokens)

    def shutdown(self) -> None:
        """End the functions' processes."""
        for functions in self._functions.values():
            functions.close()


def set_votes(scored: Future[Columns]) -> Tensor:
    """(B,) int64: what `rewards.votes` has found in the responses of a call of `score_set`."""
    return scored.facts()[_VOTE]


def reward_result(scored: Future[Columns]) -> RewardResult:
    """Wait for a call of `score`: its result, for the samples of its batch in their order."""
    facts = scored.facts()

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): fact for name, fact in facts.items() if name.startswith(prefix)}

    failures = tuple(failure for note in scored.notes() for failure in note)
    return RewardResult(
        facts[_TOTAL], named(_VALUE), named(_FAILED), facts[_DROPPED], failures, named(_FIGURE), named(_COUNT)
    )
