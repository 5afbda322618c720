"""Groups that were drawn and not trained on: in a checkpoint, and in the stream that continues from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine3d.rollout.requests import Response
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.stored_rows import SampleEnd, StoredRow, gathered
from hybridflow.batch.worker_output import pack
from hybridflow.data.prompts import Prompts
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.ledger import Group
from hybridflow.rollout.stream.groups import GatheredGroup, StreamState


@dataclass(frozen=True)
class BufferedGroups:
    """Groups that were drawn and not trained on.

    Args:
        ledger: `Ledger.state()`.
        first_samples: id of the first sample of each group in flight or complete, by the group's number.
        ended: samples of these groups that have ended; None without any.
        begun: samples that have a prefix of their response; None without any.
        scores: scores of samples that have ended, by sample id: for "reward" and "cost", fields of a `SampleScore`.
        streamed: True if a stream drew them; False for one batch that was generated ahead.
    """

    ledger: dict[str, Any]
    first_samples: dict[str, int]
    ended: SampleBatch | None = None
    begun: SampleBatch | None = None
    scores: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    streamed: bool = True

    @classmethod
    def of_batch(cls, batch: SampleBatch) -> BufferedGroups:
        """Complete groups of a batch that was generated ahead."""
        groups: dict[int, dict[str, Any]] = {}
        first_samples: dict[str, int] = {}
        columns = (batch.group_ids, batch.prompt_indices, batch.sample_ids, batch.policy_versions)
        for number, prompt, sample, version in zip(*(column.tolist() for column in columns), strict=True):
            group = {"number": number, "prompt": prompt, "attempt": 0, "oldest": version, "place": len(groups)}
            group = groups.setdefault(number, group)
            group["oldest"] = min(group["oldest"], version)
            first_samples[str(number)] = min(first_samples.get(str(number), sample), sample)
        return cls({"groups": list(groups.values()), "returned": []}, first_samples, batch, streamed=False)

    @property
    def draws(self) -> dict[int, int]:
        """Prompt index of each draw, by the draw's number."""
        groups = (*self.ledger["groups"], *self.ledger["returned"])
        return {group["number"]: group["prompt"] for group in groups}


def buffered_groups(state: StreamState, prompts: Prompts) -> BufferedGroups:
    """The groups of a stream, with their samples and the tokens of responses in flight.

    Args:
        state: of the stream.
        prompts: that its groups are of.
    """
    rows = [row for group in state.groups for row in group.rows]
    return BufferedGroups(
        state.ledger,
        {str(group.group.number): group.samples.start for group in state.groups},
        gathered(rows).fetch() if rows else None,
        _begun(state, prompts),
        {
            str(group.samples[index]): {what: asdict(score) for what, score in scores.items()}
            for group in state.groups
            for index, scores in group.scores.items()
        },
    )


def _begun(state: StreamState, prompts: Prompts) -> SampleBatch | None:
    if not state.prefixes:
        return None
    of_sample = {sample: group.group for group in state.groups for sample in group.samples}
    groups, responses = [of_sample[sample] for sample in state.prefixes], state.prefixes.values()
    return SampleBatch.from_generations(
        prompts=[prompts.tokens[group.prompt] for group in groups],
        responses=[response.token_ids for response in responses],
        logprobs=[response.logprobs for response in responses],
        sample_ids=list(state.prefixes),
        group_ids=[group.number for group in groups],
        prompt_indices=[group.prompt for group in groups],
        policy_versions=[response.oldest_version for response in responses],
        finish_reasons=[FinishReason.ABORT] * len(responses),
        token_versions=[response.versions for response in responses],
        routes=[response.routes for response in responses],
    )


def stream_state(buffered: BufferedGroups, samples_drawn: int, samples_per_prompt: int) -> StreamState:
    """State of a stream with these groups, whose samples are put into this node's object store."""
    groups = {
        saved["number"]: Group(saved["number"], saved["prompt"], saved["attempt"])
        for saved in buffered.ledger["groups"]
    }
    gathered = {
        int(number): GatheredGroup(groups[int(number)], range(first, first + samples_per_prompt))
        for number, first in buffered.first_samples.items()
    }
    if buffered.ended is not None:
        packed, summary = pack(buffered.ended)
        columns, per_sample, node = ray.put(packed), ray.put(summary), ray.get_runtime_context().get_node_id()
        batch = buffered.ended
        samples = zip(
            batch.sample_ids.tolist(),
            batch.group_ids.tolist(),
            batch.response_lengths.tolist(),
            batch.policy_versions.tolist(),
            strict=True,
        )
        for row, (sample, number, tokens, oldest) in enumerate(samples):
            group = gathered[number]
            index = group.samples.index(sample)
            stored = StoredRow(columns, row, per_sample, node)
            group.ends[index] = SampleEnd(sample, number, index, tokens, oldest, complete=True, row=stored)
            if (scores := buffered.scores.get(str(sample))) is not None:
                group.scores[index] = {what: SampleScore(**values) for what, values in scores.items()}
    return StreamState(buffered.ledger, samples_drawn, tuple(gathered.values()), _prefixes(buffered.begun))


def _prefixes(begun: SampleBatch | None) -> dict[int, Response]:
    """Tokens of samples that have begun, by id."""
    if begun is None:
        return {}
    assert begun.token_versions is not None
    lengths = begun.response_lengths.tolist()
    columns = zip(
        begun.responses(),
        begun.logprobs.split(lengths),
        begun.token_versions.split(lengths),
        [None] * len(begun) if begun.routes is None else begun.routes.split(begun.sequence_lengths.tolist()),
        strict=True,
    )
    return {
        sample: Response(
            tokens, logprobs.tolist(), versions.tolist(), routes=None if routes is None else routes[:-1].numpy()
        )
        for sample, (tokens, logprobs, versions, routes) in zip(begun.sample_ids.tolist(), columns, strict=True)
    }
