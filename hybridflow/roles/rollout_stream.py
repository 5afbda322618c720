"""An engine's part in a stream of rollouts: it takes requests one by one, and has what ended ready as samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from engine3d.engine_figures import EngineFigures
from engine3d.rollout.config import Sampling
from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.host.messages import Response
from engine3d.rollout.streams import Asked
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stream_requests import Begun, Ended, SampleEnd, StreamRequest
from hybridflow.batch.worker_output import Packed, Summary, pack, send_tensors_as_arrays


class EngineStream:
    """What the controller asks of an engine, beside the calls of its group.

    Args:
        number: of the engine.
        engine: that has been started.
        sampling: of all responses.
    """

    def __init__(self, number: int, engine: RolloutEngine, sampling: Sampling) -> None:
        self._number, self._engine, self._sampling = number, engine, sampling
        self._requests: dict[int, StreamRequest] = {}
        self._prompts: dict[int, list[int]] = {}
        self._began: dict[int, float] = {}

    def submit(
        self,
        requests: Sequence[StreamRequest],
        begun: Sequence[Response | None],
        prompts: Mapping[int, list[int]],
    ) -> None:
        """Begin responses.

        Args:
            requests: of them.
            begun: what each has from before a restart.
            prompts: token ids, by the index of the prompt.
        """
        seeded = self._engine.config.deterministic
        self._prompts |= {request.sample: prompts[request.prompt] for request in requests}
        self._requests |= {request.sample: request for request in requests}
        self._began |= dict.fromkeys((request.sample for request in requests), time.time())
        self._engine.submit(
            [
                Asked(
                    request.sample,
                    prompts[request.prompt],
                    self._sampling.for_prompt(len(prompts[request.prompt])),
                    seed=(request.group, request.place) if seeded else None,
                    begun=response,
                )
                for request, response in zip(requests, begun, strict=True)
            ]
        )

    @property
    def figures(self) -> EngineFigures:
        """How the engine is."""
        return self._engine.figures

    def take_ended(self, wait_s: float) -> tuple[Ended, Summary | None, Packed | None]:
        """What has ended since the last call: without its tokens, and the samples; waits for something, for `wait_s`.

        What was given up is among the ends, and not among the samples.
        """
        ended = self._engine.take_ended(wait_s)
        requests = [self._requests.pop(sample) for sample in ended]
        ends = [_end(request, ended[request.sample]) for request in requests]
        began = {sample: self._began.pop(sample) for sample in ended}
        prompts = {sample: self._prompts.pop(sample) for sample in ended}
        whole = [request for request, end in zip(requests, ends, strict=True) if end.whole]
        ends.sort(key=lambda end: not end.whole)  # so that the n-th whole end is of the n-th sample
        if not whole:
            return Ended(ends, figures=self.figures), None, None
        send_tensors_as_arrays()
        now = time.time()
        times = [(began[request.sample], now) for request in whole]
        answered = [prompts[request.sample] for request in whole]
        packed, summary = pack(self._samples(whole, answered, [ended[request.sample] for request in whole], times))
        return Ended(ends, figures=self.figures), summary, packed

    def abort(self, samples: Sequence[int]) -> None:
        """Give responses up; each ends with what it has."""
        self._engine.abort(samples)

    def under_way(self) -> dict[int, Begun]:
        """What the responses under way that have a token have, by sample."""
        found = self._engine.responses_under_way().items()
        return {
            sample: Begun(min(each.versions), len(each.token_ids), each) for sample, each in found if each.token_ids
        }

    def _samples(
        self,
        requests: Sequence[StreamRequest],
        prompts: Sequence[list[int]],
        responses: Sequence[Response],
        times: Sequence[tuple[float, float]],
    ) -> SampleBatch:
        return SampleBatch.from_generations(
            prompts=prompts,
            responses=[response.token_ids for response in responses],
            logprobs=[response.logprobs for response in responses],
            sample_ids=[request.sample for request in requests],
            group_ids=[request.group for request in requests],
            prompt_indices=[request.prompt for request in requests],
            policy_versions=[min(response.versions) for response in responses],
            finish_reasons=[_reason(response) for response in responses],
            token_versions=[response.versions for response in responses],
            engine=self._number,
            times=times,
        )


def _end(request: StreamRequest, response: Response) -> SampleEnd:
    return SampleEnd(
        request.sample,
        request.group,
        request.place,
        len(response.token_ids),
        min(response.versions, default=-1),
        whole=response.finish_reason in ("stop", "length") and bool(response.versions),
    )


def _reason(response: Response) -> Any:
    assert response.finish_reason is not None
    return response.finish_reason
