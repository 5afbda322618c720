"""The requests of an engine's client: what is checked before they are sent, and responses that come one by one."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine3d.engine_figures import EngineFigures
from engine3d.errors import UserError
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.host.messages import Response, ResponseRequest
from engine3d.rollout.host.owner import HostOwner
from engine3d.rollout.host.process import HostProcess
from engine3d.rollout.scheduler.text_stops import PARAMETER

if TYPE_CHECKING:
    from engine3d.rollout.launch import ModelFacts


@dataclass(frozen=True, slots=True)
class Asked:
    """A response of a stream that is asked for.

    Args:
        sample: names it; unique among those under way.
        prompt: token ids.
        sampling: how its tokens are drawn.
        seed: of a deterministic engine, with which and the engine's own the same tokens are drawn again: a prompt's
            and a sample's number.
        begun: what it has already, from which it goes on.
    """

    sample: int
    prompt: Sequence[int]
    sampling: SamplingConfig
    seed: tuple[int, int] | None = None
    begun: Response | None = None


class ResponseStreams(HostOwner):
    """The part of an engine's client that takes prompts. Its other part knows whether the engine can compute."""

    _model: ModelFacts
    _context_length: int
    _cache_tokens: int

    @abstractmethod
    def _able(self) -> HostProcess:
        """The host process of an engine that can compute. Raises EngineError of another."""

    @property
    @abstractmethod
    def _changing(self) -> bool:
        """Whether a transfer of weights is under way, which responses that are asked for wait for."""

    def _taking(self) -> HostProcess:
        return self._running() if self._changing else self._able()

    def submit(self, asked: Sequence[Asked], timeout_s: float | None = None) -> None:
        """Begin responses; returns at once. `take_ended` has each as it ends. Needs `RolloutConfig.token_versions`.

        They may be under way while weights change: `begin_weights` says what becomes of them then.

        Raises UserError as `generate` does, and for a sample that is under way; EngineError while the weights are not
        whole, or the KV cache was released.
        """
        host = self._taking()
        if not self.config.token_versions:
            raise UserError("a stream of responses needs rollout.token_versions=true when the engine is started")
        for each in asked:
            self._check_prompts([each.prompt], [each.sampling], 1, None if each.seed is None else [each.seed[0]])
            if self.config.deterministic and each.seed is None:
                raise UserError(f"sample {each.sample} has no seed, and the engine is deterministic")
        requests = [
            ResponseRequest(each.sample, list(each.prompt), self._parameters(each), each.begun) for each in asked
        ]
        host.responses.asked(each.sample for each in asked)
        timeout_s = timeout_s if timeout_s is not None else self.config.request_timeout_s
        host.call("stream", "submit", timeout_s, requests=requests)

    def _parameters(self, asked: Asked) -> dict[str, Any]:
        parameters = sampling_parameters(asked.sampling)
        if asked.seed is None:
            return parameters
        return {**parameters, "sampling_seed": sample_seed(self.config.seed, *asked.seed)}

    def take_ended(self, timeout_s: float) -> dict[int, Response]:
        """Responses of the stream that have ended since the last call, by sample; waits for one, for `timeout_s`.

        Raises EngineError when the engine has died, could not make a response, or came no further for
        `request_timeout_s` with responses under way.
        """
        # While weights change it may stand still, for as long as their transfer may take.
        stalled_s = float("inf") if self._changing else self.config.request_timeout_s
        return self._running().responses.take(timeout_s, stalled_s)

    def abort(self, samples: Sequence[int]) -> None:
        """Give responses of the stream up: each ends with what it has and finish reason "abort"."""
        self._running().call("abort", "abort", self.config.request_timeout_s, samples=list(samples))

    def responses_under_way(self) -> dict[int, Response]:
        """What the responses of the stream that are under way have so far, by sample."""
        found: dict[int, Response] = self._running().call(
            "look at responses", "under_way", self.config.request_timeout_s
        )
        return found

    @property
    def figures(self) -> EngineFigures:
        """How the engine is, as it has told last, with what ended or within a second."""
        return self._running().responses.figures or EngineFigures(self._cache_tokens)

    def _check_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        drawn_by: Sequence[SamplingConfig],
        samples_per_prompt: int,
        seeds: Sequence[int] | None,
    ) -> None:
        if samples_per_prompt < 1:
            raise UserError(f"samples_per_prompt is {samples_per_prompt} and must be at least 1")
        if seeds is not None and not self.config.deterministic:
            raise UserError("seeds need an engine with rollout.deterministic=true")
        if seeds is not None and len(seeds) != len(prompts):
            raise UserError(f"{len(seeds)} seeds for {len(prompts)} prompts")
        for sampling in {id(each): each for each in drawn_by}.values():
            self._check_sampling(sampling)
        for index, (prompt, sampling) in enumerate(zip(prompts, drawn_by, strict=True)):
            longest = self._context_length - sampling.max_new_tokens
            if not prompt:
                raise UserError(f"prompt {index} is empty")
            if len(prompt) > longest:
                raise UserError(
                    f"prompt {index} has {len(prompt)} tokens; at most {max(longest, 0)} leave room for max_new_tokens "
                    f"{sampling.max_new_tokens} in a context of {self._context_length}"
                )
            self._check_tokens(f"prompt {index}", prompt)

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


def sampling_parameters(sampling: SamplingConfig) -> dict[str, Any]:
    """SGLang's parameters."""
    parameters = sampling.model_dump(exclude={"stop", "stop_token_ids"})
    parameters |= {"stop_token_ids": list(sampling.stop_token_ids), "skip_special_tokens": False}
    return parameters | ({"custom_params": {PARAMETER: list(sampling.stop)}} if sampling.stop else {})


def sample_seed(engine_seed: int, key: int, sample: int) -> int:
    """A seed of 31 bits for one sample. A hash, so that neighbours share nothing."""
    digest = hashlib.blake2b(f"{engine_seed}/{key}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
