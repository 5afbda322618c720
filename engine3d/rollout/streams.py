"""The requests of an engine's client: what is checked before they are sent, and their responses as they end."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from engine3d.errors import EngineError, UserError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.host.process import HostOwner, HostProcess
from engine3d.rollout.requests import EngineStats, Request, Response

if TYPE_CHECKING:
    from engine3d.rollout.launch import ModelDirectory

_WAIT_S = 0.5
"""Seconds between two looks at the engine's progress in a wait for several responses."""


class ResponseStreams(HostOwner):
    """The part of an engine's client that takes prompts. Its other part knows whether the engine can compute."""

    _model: ModelDirectory
    _context_length: int
    _cache_tokens: int

    @abstractmethod
    def _able(self) -> HostProcess:
        """The host process of an engine that can compute. Raises EngineError of another."""

    @property
    @abstractmethod
    def _changing(self) -> bool:
        """True if a transfer of weights has begun, which requests one by one wait for."""

    def submit(self, requests: Sequence[Request], *, together: bool = False, timeout_s: float | None = None) -> None:
        """Begin responses; returns at once. `take_ended` has each as it ends.

        One by one they may be in flight while weights change (`begin_weights` says what becomes of them), which needs
        `RolloutConfig.token_versions`. Without it all tokens of a response have the version that is served as it ends.

        Args:
            requests: of one call.
            together: True if they are to reach the scheduler in one message, in an order in which a prompt is computed
                once for all of its group, and to end in one message too. The same requests, together, give the same
                bits on a CPU. Requests of a group follow each other, and none has a prefix.
            timeout_s: limit of the call, `request_timeout_s` if None.

        Raises:
            UserError: an empty prompt, a token id outside the vocabulary, a prompt that leaves no room for
                `max_new_tokens` in the context, settings of sampling that the engine does not have, or a sample that is
                in flight.
            EngineError: the weights are incomplete, or the KV cache was released.
        """
        host = self._running() if self._changing and not together else self._able()
        if not (together or self.config.token_versions):
            raise UserError("responses one by one need rollout.token_versions=true when the engine is started")
        self._check_requests(requests, together)
        if not requests:
            return
        samples = [request.sample for request in requests]
        host.responses.submitted(samples)
        try:
            host.call(
                "generation",
                "submit",
                timeout_s if timeout_s is not None else self.config.request_timeout_s,
                responses=len(requests) if together else None,
                requests=list(requests),
                together=together,
            )
        except BaseException:
            host.responses.forget(samples)
            raise

    def take_ended(self, timeout_s: float, samples: Collection[int] | None = None) -> dict[int, Response]:
        """Responses that have ended since the last call, by sample; waits up to `timeout_s` for one.

        One that the engine could not make is among them, with its `error`.

        Args:
            timeout_s: limit of the wait.
            samples: ids of the only ones to take; all if None.

        Raises:
            EngineError: the engine has died, or came no further for `request_timeout_s` with responses in flight.
        """
        # While weights change it may stand still, for as long as their transfer may take.
        stalled_s = float("inf") if self._changing else self.config.request_timeout_s
        return self._running().responses.take(timeout_s, stalled_s, samples)

    def wait_for(self, samples: Sequence[int]) -> list[Response]:
        """The responses of these samples, in their order, once all have ended.

        Where that fails, as when it is interrupted, they are aborted, and nobody takes them any more.

        Raises:
            EngineError: as `take_ended`, for a response that could not be made, or a sample that is not in flight.
        """
        left, ended = set(samples), dict[int, Response]()
        try:
            while left:
                self._running().responses.check_known(left)
                ended |= (new := self.take_ended(_WAIT_S, left))
                left.difference_update(new)
                for sample, response in new.items():
                    if response.error is not None:
                        log = self._running().log_path
                        raise EngineError(f"rollout engine: sample {sample}: {response.error}; log: {log}")
        except BaseException:
            host = self._running()
            host.notify("abort", samples=sorted(left))
            host.responses.forget(left)
            raise
        return [ended[sample] for sample in samples]

    def abort(self, samples: Sequence[int]) -> None:
        """Abort responses: each ends with what it has and finish reason "abort"."""
        self._running().call("abort", "abort", self.config.request_timeout_s, samples=list(samples))

    def responses_in_flight(self) -> dict[int, Response]:
        """The responses in flight that were submitted one by one, as far as they are, by sample."""
        responses: dict[int, Response] = self._running().call(
            "look at responses", "in_flight", self.config.request_timeout_s
        )
        return responses

    @property
    def stats(self) -> EngineStats:
        """Latest stats of the engine, reported with responses that end, or within a second."""
        return self._running().responses.stats or EngineStats(self._cache_tokens)

    def _check_requests(self, requests: Sequence[Request], together: bool) -> None:
        for sampling in {id(request.sampling): request.sampling for request in requests}.values():
            self._check_sampling(sampling)
        prompts = {(id(request.prompt), id(request.sampling)): request for request in requests}  # which samples share
        for index, request in enumerate(prompts.values()):
            self._check_prompt(f"prompt {index}", request)
        if together and (continued := [request.sample for request in requests if request.prefix is not None]):
            raise UserError(f"sample {continued[0]} has a prefix, expected none in requests submitted together")

    def _check_prompt(self, name: str, request: Request) -> None:
        longest = self._context_length - request.sampling.max_new_tokens
        if not request.prompt:
            raise UserError(f"{name} is empty")
        if len(request.prompt) > longest:
            raise UserError(
                f"{name} has {len(request.prompt)} tokens; at most {max(longest, 0)} leave room for max_new_tokens "
                f"{request.sampling.max_new_tokens} in a context of {self._context_length}"
            )
        self._check_tokens(name, request.prompt)

    def _check_sampling(self, sampling: SamplingConfig) -> None:
        if self.config.deterministic and sampling.min_p > 0:
            raise UserError(f"min_p is {sampling.min_p}: SGLang cannot sample deterministically with min_p above 0")
        if sampling.stop and not (self._model.directory / "tokenizer_config.json").is_file():
            raise UserError(
                f"stop is {list(sampling.stop)}: {self._model.directory} has no tokenizer_config.json, and without a "
                "tokenizer responses have no text"
            )

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._model.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self._model.vocab_size)
            raise UserError(f"{name} has token id {wrong}; the vocabulary is 0 to {self._model.vocab_size - 1}")
