"""Reward functions as a role of the dataflow: responses are scored where their tokens are fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.startup.imports import quick_imports
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stored_rows import StoredRow, gathered
from hybridflow.batch.worker_output import Columns
from hybridflow.data.files.config import ChatConfig
from hybridflow.data.tasks import Example
from hybridflow.environments.config import EnvironmentConfig
from hybridflow.rewards.config import MOST_AT_ONCE, JudgeServers, RewardConfig
from hybridflow.rewards.functions import RewardFunctions
from hybridflow.rewards.result import RewardResult, SampleScore, by_sample
from hybridflow.rewards.votes import votes
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.future import Future
from hybridflow.workers.protocols import DP_PROTO, ONE_TO_ALL, register

if TYPE_CHECKING:
    from hybridflow.environments.episode_host import EpisodeHost

_TOTAL, _DROPPED, _VALUE, _FAILED, _METRIC, _COUNT = "total", "dropped", "value/", "failed/", "metric/", "count/"
_VOTE = "vote"
_OF_TRAINING = ("reward", "cost")


class FunctionRewardWorker:
    """Calls every function of rewards, or of costs, with its shard of a batch.

    Args:
        context: the rank.
        configs: the functions by their purpose: "reward", "cost", and those of sets by `PlannedSet.scorer`.
        tokenizer: directory of the tokenizer that turns responses into texts.
        fields: names of further data columns that functions may use.
        directory: base of relative paths of functions.
        environment: of the episodes, whose reward stands for that of functions; None without.
        chat: of conversations, for observations that are messages, and agents.
        sampling: distribution of the policy, for agents: options by name.

    Raises:
        UserError: the directory is not there on this node.
    """

    concurrent_threads = MOST_AT_ONCE
    """Threads for a stream, whose responses are scored as they end."""

    def __init__(
        self,
        context: WorkerContext,
        configs: Mapping[str, RewardConfig],
        tokenizer: Path,
        fields: Sequence[str],
        directory: Path,
        environment: EnvironmentConfig | None = None,
        chat: ChatConfig | None = None,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        if not directory.is_dir():
            raise UserError(f"reward functions are looked for from {directory}, which is not there on its node")
        os.chdir(directory)
        self._fields = tuple(fields)
        self._environment, self._chat, self._sampling = environment, chat, sampling or {}
        self._host: EpisodeHost | None = None
        if environment is not None:  # it gives the reward itself
            configs = {what: config for what, config in configs.items() if what != "reward"}
        self._configs, self._of_training = configs, [what for what in _OF_TRAINING if what in configs]
        self._make_functions()
        self._tokenizer_directory = tokenizer

    def _make_functions(self) -> None:
        self._functions = {what: RewardFunctions(config, self._fields) for what, config in self._configs.items()}

    @register(ONE_TO_ALL)
    def start(self, *, judge: JudgeServers | None = None, judge_key: str = "") -> None:
        """Load the tokenizer and import every function.

        Args:
            judge: servers of the recipe's judge model, for functions that call it.
            judge_key: key of their requests.
        """
        if judge is not None:
            os.environ[judge.key_variable] = judge_key
            self._configs = {what: config.served_by(judge) for what, config in self._configs.items()}
            self._make_functions()
        with quick_imports():  # still slow: roles that start after this one do not wait for it
            from hybridflow.data.tokenizer import load_tokenizer

        for functions in self._functions.values():
            functions.load()
        self._tokenizer = load_tokenizer(self._tokenizer_directory)
        if self._environment is not None:
            self._host = self._start_environments(self._environment)

    def _start_environments(self, config: EnvironmentConfig) -> EpisodeHost:
        from hybridflow.environments.agents.host import AgentHost, agent_template
        from hybridflow.environments.episode_host import EpisodeHost
        from hybridflow.environments.observation_tokens import ObservationTokens, observation_template, tool_messages

        if config.agent is not None:
            host: EpisodeHost = AgentHost(
                config, self._tokenizer, agent_template(self._chat, self._tokenizer), self._sampling
            )
            tokens = None
        else:
            template = observation_template(config, self._chat, self._tokenizer)
            tokens = ObservationTokens(self._tokenizer, template, config.role)
            host = EpisodeHost(config, tokens)
        try:
            host.start()
            if tokens is not None:
                tokens.tools = tool_messages(config, self._chat, host.tools, self._tokenizer)
        except UserError:
            host.close()
            raise
        return host

    def of_environments(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `EpisodeHost`, from a rollout controller."""
        assert self._host is not None
        return getattr(self._host, method)(*arguments)

    @register(DP_PROTO)
    def score(self, batch: SampleBatch, *, examples: Mapping[int, Example], what: str = "reward") -> Columns:
        """Compute the rewards (or costs) of responses, which `reward_result` reads.

        Failures go into this rank's log too, by the id of their sample. A function may fail on all of its shard. The
        caller checks with `check_given` that a step has enough.

        Args:
            batch: this rank's shard.
            examples: the prompts and answers, by the batch's prompt indices.
            what: "reward" or "cost".
        """
        return self._columns(batch, examples, what)

    @register(DP_PROTO)
    def score_set(self, batch: SampleBatch, *, examples: Mapping[int, Example], what: str) -> Columns:
        """Score responses of a set of `evaluation` as `score`, and add their votes, which `set_votes` reads."""
        columns = self._columns(batch, examples, what)
        config = self._configs[what]
        texts = self._texts(
            batch, keep_special_tokens=any(function.votes_with_special_tokens for function in config.functions)
        )
        votes_cast = torch.tensor(votes(texts, config), dtype=torch.int64)
        return replace(columns, per_sample=columns.per_sample | {_VOTE: votes_cast})

    def _columns(self, batch: SampleBatch, examples: Mapping[int, Example], what: str) -> Columns:
        result = self._evaluated(batch, examples, what)
        per_sample = {_TOTAL: result.total, _DROPPED: result.dropped}
        per_sample |= {f"{_VALUE}{name}": column for name, column in result.by_name.items()}
        per_sample |= {f"{_FAILED}{name}": mask for name, mask in result.failed.items()}
        per_sample |= {f"{_METRIC}{name}": column for name, column in result.metrics.items()}
        per_sample |= {f"{_COUNT}{name}": column for name, column in result.counts.items()}
        return Columns(per_sample=per_sample, note=result.failures)

    def score_rows(self, rows: Sequence[StoredRow], examples: Mapping[int, Example]) -> list[dict[str, SampleScore]]:
        """Score samples of a stream as `score`. Return the scores of each reward and cost function, by its purpose."""
        batch = gathered(rows).fetch()
        by_purpose = {what: by_sample(self._evaluated(batch, examples, what)) for what in self._of_training}
        return [{what: scores[row] for what, scores in by_purpose.items()} for row in range(len(rows))]

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
            complete=False,
        )
        for failure in result.failures:
            print(f"sample {int(batch.sample_ids[failure.sample])}: {failure}")
        return result

    def _texts(self, batch: SampleBatch, *, keep_special_tokens: bool) -> list[str]:
        from hybridflow.data.tokenizer import response_texts

        return response_texts(self._tokenizer, batch.responses(), keep_special_tokens=keep_special_tokens)

    def shutdown(self) -> None:
        """End the processes of functions and environments."""
        if self._host is not None:
            self._host.close()
        for functions in self._functions.values():
            functions.close()


def set_votes(scored: Future[Columns]) -> Tensor:
    """Return the (B,) int64 votes of `rewards.votes` for the responses of a call of `score_set`."""
    return scored.per_sample()[_VOTE]


def reward_result(scored: Future[Columns]) -> RewardResult:
    """Wait for a call of `score`. Return its result in the order of the batch's samples."""
    per_sample = scored.per_sample()

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): column for name, column in per_sample.items() if name.startswith(prefix)}

    failures = tuple(failure for note in scored.notes() for failure in note)
    return RewardResult(
        per_sample[_TOTAL], named(_VALUE), named(_FAILED), per_sample[_DROPPED], failures, named(_METRIC), named(_COUNT)
    )
