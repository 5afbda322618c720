"""Groups that were drawn and not trained on: in a checkpoint, and in the stream that continues from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine3d.rollout.requests import Response
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.stream_requests import SampleEnd, StoredRow, StoredRows, gathered
from hybridflow.batch.worker_output import pack
from hybridflow.data.prompts import Prompts
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.stream.types import GroupState, StreamState


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
    rows = [row for group in state.groups for _, row in group.ended]
    return BufferedGroups(
        state.ledger,
        {str(group.number): group.first_sample for group in state.groups},
        gathered(rows).fetch() if rows else None,
        _begun(state, prompts),
        {
            str(group.first_sample + index): {what: asdict(score) for what, score in scores.items()}
            for group in state.groups
            for index, scores in group.scores.items()
        },
    )


def _begun(state: StreamState, prompts: Prompts) -> SampleBatch | None:
    of_group = {group["number"]: group["prompt"] for group in state.ledger["groups"]}
    responses = [
        (group, index, of_group[group.number], response)
        for group in state.groups
        for index, response in sorted(group.prefixes.items())
        if response is not None
    ]
    if not responses:
        return None
    return SampleBatch.from_generations(
        prompts=[prompts.tokens[prompt] for _, _, prompt, _ in responses],
        responses=[response.token_ids for *_, response in responses],
        logprobs=[response.logprobs for *_, response in responses],
        sample_ids=[group.first_sample + index for group, index, _, _ in responses],
        group_ids=[group.number for group, *_ in responses],
        prompt_indices=[prompt for _, _, prompt, _ in responses],
        policy_versions=[response.oldest_version for *_, response in responses],
        finish_reasons=[FinishReason.ABORT] * len(responses),
        token_versions=[response.versions for *_, response in responses],
        routes=[response.routes for *_, response in responses],
    )


def stream_state(buffered: BufferedGroups, samples_drawn: int, samples_per_prompt: int) -> StreamState:
    """State of a stream with these groups, whose samples are put into this node's object store."""
    firsts = {int(number): first for number, first in buffered.first_samples.items()}
    ended: dict[int, list[tuple[SampleEnd, StoredRow]]] = {number: [] for number in firsts}
    if buffered.ended is not None:
        packed, summary = pack(buffered.ended)
        rows = StoredRows(ray.put(summary), ray.put(packed), ray.get_runtime_context().get_node_id())
        batch = buffered.ended
        samples = zip(
            batch.sample_ids.tolist(),
            batch.group_ids.tolist(),
            batch.response_lengths.tolist(),
            batch.policy_versions.tolist(),
            strict=True,
        )
        for index, (sample, group, tokens, oldest) in enumerate(samples):
            end = SampleEnd(sample, group, sample - firsts[group], tokens, oldest, complete=True)
            ended[group].append((end, StoredRow(rows, index)))
    scores: dict[int, Mapping[str, SampleScore]] = {
        int(sample): {what: SampleScore(**values) for what, values in of_sample.items()}
        for sample, of_sample in buffered.scores.items()
    }
    prefixes: dict[int, Response] = {}
    if buffered.begun is not None:
        batch = buffered.begun
        assert batch.token_versions is not None
        lengths = batch.response_lengths.tolist()
        columns = zip(
            batch.responses(),
            batch.logprobs.split(lengths),
            batch.token_versions.split(lengths),
            [None] * len(batch) if batch.routes is None else batch.routes.split(batch.sequence_lengths.tolist()),
            strict=True,
        )
        for sample, (tokens, logprobs, versions, routes) in zip(batch.sample_ids.tolist(), columns, strict=True):
            prefixes[sample] = Response(
                tokens, logprobs.tolist(), versions.tolist(), routes=None if routes is None else routes[:-1].numpy()
            )
    groups = []
    for number, first in firsts.items():
        complete = {end.index for end, _ in ended[number]}
        missing = [index for index in range(samples_per_prompt) if index not in complete]
        of_ended = {index: scores[first + index] for index in sorted(complete) if first + index in scores}
        resumed = {index: prefixes.get(first + index) for index in missing}
        groups.append(GroupState(number, first, tuple(ended[number]), resumed, of_ended))
    return StreamState(buffered.ledger, samples_drawn, tuple(groups))
