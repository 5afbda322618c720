"""What a checkpoint holds of a stream of rollouts, and the stream that goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine3d.rollout.host.messages import Response
from hybridflow.batch.lazy_ray import ray
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import FinishReason
from hybridflow.batch.stored_rows import Row, StoredRows, gathered
from hybridflow.batch.stream_requests import Begun, SampleEnd
from hybridflow.batch.worker_output import pack
from hybridflow.data.prompts import Prompts
from hybridflow.rewards.result import SampleScore
from hybridflow.rollout.stream_types import GroupState, StreamState


@dataclass(frozen=True)
class HeldStream:
    """What a checkpoint holds of a stream.

    Args:
        ledger: `Ledger.state()`.
        first_samples: id of the first sample of each group under way, by the group's number.
        ended: the samples of these groups that have ended; None without any.
        begun: those that have a part of their response; None without any.
        scores: of samples that have ended, by their ids: for "reward" and "cost", fields of a `SampleScore`.
    """

    ledger: dict[str, Any]
    first_samples: dict[str, int]
    ended: SampleBatch | None = None
    begun: SampleBatch | None = None
    scores: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)


def held_stream(state: StreamState, prompts: Prompts) -> HeldStream:
    """All that is under way, with its samples and the tokens of responses that have begun.

    Args:
        state: of the stream.
        prompts: that its groups are of.
    """
    rows = [row for each in state.groups for _, row in each.ended]
    return HeldStream(
        state.ledger,
        {str(each.number): each.first_sample for each in state.groups},
        gathered(rows).fetch() if rows else None,
        _begun(state, prompts),
        {
            str(each.first_sample + place): {what: asdict(score) for what, score in scores.items()}
            for each in state.groups
            for place, scores in each.scores.items()
        },
    )


def _begun(state: StreamState, prompts: Prompts) -> SampleBatch | None:
    of_group = {each["number"]: each["prompt"] for each in state.ledger["groups"]}
    parts = [
        (each, place, of_group[each.number], begun.content)
        for each in state.groups
        for place, begun in sorted(each.begun.items())
        if begun is not None
    ]
    if not parts:
        return None
    return SampleBatch.from_generations(
        prompts=[prompts.tokens[prompt] for _, _, prompt, _ in parts],
        responses=[response.token_ids for *_, response in parts],
        logprobs=[response.logprobs for *_, response in parts],
        sample_ids=[group.first_sample + place for group, place, _, _ in parts],
        group_ids=[group.number for group, *_ in parts],
        prompt_indices=[prompt for _, _, prompt, _ in parts],
        policy_versions=[min(response.versions) for *_, response in parts],
        finish_reasons=[FinishReason.ABORT] * len(parts),
        token_versions=[response.versions for *_, response in parts],
    )


def restored(held: HeldStream, samples_drawn: int, samples_per_prompt: int) -> StreamState:
    """The state that was held, its samples in this node's object store."""
    firsts = {int(number): first for number, first in held.first_samples.items()}
    ended: dict[int, list[tuple[SampleEnd, Row]]] = {number: [] for number in firsts}
    if held.ended is not None:
        packed, summary = pack(held.ended)
        rows = StoredRows(ray.put(summary), ray.put(packed), ray.get_runtime_context().get_node_id())
        batch = held.ended
        facts = zip(
            batch.sample_ids.tolist(),
            batch.group_ids.tolist(),
            batch.response_lengths.tolist(),
            batch.policy_versions.tolist(),
            strict=True,
        )
        for place, (sample, group, tokens, oldest) in enumerate(facts):
            end = SampleEnd(sample, group, sample - firsts[group], tokens, oldest, whole=True)
            ended[group].append((end, Row(rows, place)))
    scores: dict[int, Mapping[str, SampleScore]] = {
        int(sample): {what: SampleScore(**values) for what, values in each.items()}
        for sample, each in held.scores.items()
    }
    begun: dict[int, Begun] = {}
    if held.begun is not None:
        batch = held.begun
        assert batch.token_versions is not None
        lengths = batch.response_lengths.tolist()
        columns = zip(
            batch.responses(), batch.logprobs.split(lengths), batch.token_versions.split(lengths), strict=True
        )
        for sample, (tokens, logprobs, versions) in zip(batch.sample_ids.tolist(), columns, strict=True):
            response = Response(tokens, logprobs.tolist(), versions.tolist())
            begun[sample] = Begun(min(response.versions), len(tokens), response)
    groups = []
    for number, first in firsts.items():
        there = {end.place for end, _ in ended[number]}
        missing = [place for place in range(samples_per_prompt) if place not in there]
        of_ended = {place: scores[first + place] for place in sorted(there) if first + place in scores}
        going_on = {place: begun.get(first + place) for place in missing}
        groups.append(GroupState(number, first, tuple(ended[number]), going_on, of_ended))
    return StreamState(held.ledger, samples_drawn, tuple(groups))
