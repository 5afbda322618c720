"""An engine in a stream of rollouts: it takes requests one by one, and has what ended ready as samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.requests import EngineStats, Request, Response
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.stream_requests import SampleEnd, SampleEnds
from hybridflow.batch.worker_output import Packed, Summary, pack, send_tensors_as_arrays


class EngineStream:
    """The calls of an engine by a rollout controller, concurrent with those of its group.

    Args:
        number: of the engine.
        engine: that has been started.
        at_work: makes a block count as a call of a method, for those who watch the rank.
    """

    def __init__(
        self, number: int, engine: RolloutEngine, at_work: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._number, self._engine, self._at_work = number, engine, at_work
        self._generating = ExitStack()
        """Closed once the requests that were submitted together have ended."""
        self._together: set[int] = set()
        """Samples in flight that were submitted together."""
        self._turns: set[int] = set()
        """Samples in flight of which a turn of an episode is drawn."""
        self._lock = threading.Lock()
        self._requests: dict[int, tuple[Request, int, float]] = {}
        """Requests by sample, with the index of the prompt and the time of the submission."""

    def submit(
        self, requests: Sequence[Request], prompts: Sequence[int], together: bool = False, turns: bool = False
    ) -> None:
        """Begin responses.

        Args:
            requests: of them.
            prompts: for each request the index of its prompt.
            together: True if the requests end together.
            turns: True if they are turns of episodes, whose tokens go to the controller.
        """
        now = time.time()
        self._requests |= {
            request.sample: (request, prompt, now) for request, prompt in zip(requests, prompts, strict=True)
        }
        if turns:
            self._turns.update(request.sample for request in requests)
        if together:
            with self._lock:
                if not self._together:
                    self._generating.enter_context(self._at_work("generate"))
                self._together.update(request.sample for request in requests)
        self._engine.submit(requests, together=together)

    @property
    def stats(self) -> EngineStats:
        """Stats of the engine."""
        return self._engine.stats

    def take_ended(self, wait_s: float) -> tuple[SampleEnds, Summary | None, Packed | None]:
        """Return responses that have ended since the last call: without their tokens, and as samples.

        Waits up to `wait_s` for one. Aborted ones are among the ends, and not among the samples.
        """
        ended = self._engine.take_ended(wait_s, self._requests)
        requests = [self._requests.pop(sample) for sample in ended]
        with self._lock:
            self._together.difference_update(ended)
            if not self._together:
                self._generating.close()
        ends = [_end(request, ended[request.sample], turn=request.sample in self._turns) for request, _, _ in requests]
        complete = [entry for entry, end in zip(requests, ends, strict=True) if end.is_stored]
        self._turns.difference_update(ended)
        ends.sort(key=lambda end: not end.is_stored)  # so that the n-th end is of the n-th sample
        if not complete:
            return SampleEnds(ends, self.stats), None, None
        send_tensors_as_arrays()
        now = time.time()
        batch = sample_batch(
            self._number,
            [request for request, _, _ in complete],
            [prompt for _, prompt, _ in complete],
            [ended[request.sample] for request, _, _ in complete],
            [(began, now) for _, _, began in complete],
            token_versions=self._engine.config.token_versions,
        )
        packed, summary = pack(batch)
        return SampleEnds(ends, self.stats), summary, packed

    def abort(self, samples: Sequence[int]) -> None:
        """Abort responses; each ends with what it has."""
        self._engine.abort(samples)

    def close(self) -> None:
        """Report no generation any more: the engine is gone, and so is what was in flight."""
        with self._lock:
            self._together.clear()
            self._generating.close()

    def in_flight(self) -> dict[int, Response]:
        """Return the responses in flight that have a token, by sample."""
        responses = self._engine.responses_in_flight().items()
        return {sample: response for sample, response in responses if response.token_ids}


def sample_batch(
    engine: int,
    requests: Sequence[Request],
    prompts: Sequence[int],
    responses: Sequence[Response],
    times: Sequence[tuple[float, float]],
    *,
    token_versions: bool,
) -> SampleBatch:
    """Make samples of responses.

    Args:
        engine: number of the engine.
        requests: of the responses.
        prompts: index of the prompt of each.
        responses: that have ended.
        times: of the submission and the end of each.
        token_versions: True if samples have a version for each token.
    """
    return SampleBatch.from_generations(
        prompts=[request.prompt for request in requests],
        responses=[response.token_ids for response in responses],
        logprobs=[response.logprobs for response in responses],
        sample_ids=[request.sample for request in requests],
        group_ids=[request.group for request in requests],
        prompt_indices=prompts,
        policy_versions=[response.oldest_version for response in responses],
        finish_reasons=[str(response.finish_reason) for response in responses],
        token_versions=[response.versions for response in responses] if token_versions else None,
        routes=[response.routes for response in responses],
        engine=engine,
        times=times,
    )


def _end(request: Request, response: Response, *, turn: bool) -> SampleEnd:
    complete = response.finish_reason in ("stop", "length") and bool(response.versions)
    return SampleEnd(
        request.sample,
        request.group,
        request.index,
        len(response.token_ids),
        response.oldest_version,
        complete,
        response.error,
        response if turn and complete else None,
    )
