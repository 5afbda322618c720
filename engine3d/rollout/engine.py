"""Client of a rollout engine: start, submit requests, take weights, shut down."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from engine3d.errors import EngineError, UserError
from engine3d.models.lora.config import LoraConfig
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings
from engine3d.rollout import launch
from engine3d.rollout.cache import tokens_beyond
from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.host.messages import GivenLogprobs
from engine3d.rollout.host.process import HostOwner, HostProcess
from engine3d.rollout.host.stream import InFlightPolicy
from engine3d.rollout.requests import EngineStats, Request, Response, check_requests, check_tokens
from engine3d.rollout.scheduler.rank import AdapterBase, Call
from engine3d.rollout.shard import SINGLE_HOST, EngineShard

if TYPE_CHECKING:
    from engine3d.reshard.describe.memory import SharedShards
    from engine3d.reshard.describe.shards import Location
    from engine3d.reshard.plan.coordinate import ReceiveOrder
    from engine3d.reshard.transport.sender import Sent, Transport
    from engine3d.reshard.verify import BufferDifference


_WAIT_S = 0.5
"""Seconds between two looks at the engine's progress in a wait for several responses."""
_RELEASED = "their memory was released, and they were not transferred since"
_BOUND = "they are the trainer's, who committed none yet"


class RolloutEngine(HostOwner):
    """One SGLang engine in processes of its own. Methods may be called from several threads.

    Every method that talks to the engine raises EngineError, in one line, when the engine fails, dies, or does not
    answer in time; UserError when the arguments are wrong, before anything is sent.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: RolloutConfig,
        devices: Sequence[int] = (),
        log_path: str | Path | None = None,
        weight_sources: Sequence[Path | None] = (),
        shard: EngineShard = SINGLE_HOST,
        adapters: LoraConfig | None = None,
        fp8: Fp8Settings = NOTHING_LEFT_OUT,
    ) -> None:
        """Check everything that can be checked without starting anything.

        `devices`: the devices to use on this host, by index among those that this process sees; empty for all of them.
        `log_path`: where all that the engine's processes print goes; where None a temporary file, kept when the engine
        dies.
        `weight_sources`: for each tensor parallel rank, the file in which the trainer's rank on the same device says
        where its weights lie (`WeightSender.publish`), or None. Parameters with the same bytes become the trainer's
        memory before CUDA graphs are captured; the start waits for the files. Such an engine generates nothing until
        the first transfer was committed.
        `shard`: the first of an engine on several hosts, whose others are an `EngineMember` each; the start waits for
        them. Such an engine must not be asked for anything before all have been started.
        `adapters`: that SGLang adds to the weights; transfers bring them apart (`lora.engine`).
        `fp8`: matrices that stay in `dtype` with `precision=fp8`, the trainer's too. An engine that loads its weights
        has those in fp8 that its files have in it.
        """
        super().__init__(config, log_path)
        self._model = launch.read_model(
            Path(model_dir).resolve(), config.loads_weights, adapters, fp8, config.precision
        )
        self._context_length = launch.context_length(config, self._model)
        self._devices = tuple(devices)
        launch.check_shard(config, shard, self._devices, weight_sources)
        if shard.index:
            raise UserError(f"shard {shard.index} of a rollout engine is an EngineMember, expected shard 0")
        self._shard = shard
        self._weight_sources = tuple(weight_sources)
        # Memory that is the trainer's holds whatever the trainer is at.
        self._stale: str | None = _BOUND if any(weight_sources) else None
        if any(weight_sources) and config.release_weights:
            raise UserError("weight_sources with release_weights=true: the trainer's memory cannot be released")
        self._released = False
        self._begun: int | None = None
        self._sealed = False
        self._receive_timeout_s: float | None = None

    def start(self) -> Self:
        """Start the engine and wait until it can generate. Raises EngineError after `start_timeout_s` at the latest."""
        if self._host is not None:
            raise UserError("the rollout engine was started already")
        self._host = launch.start_host(
            self.config, self._model, self._devices, self._weight_sources, self._shard, self._log_path
        )
        limits = self._host.wait_until_up(self.config.start_timeout_s)
        assert limits is not None
        self._cache_tokens = limits.max_total_tokens
        of_a_group = limits.max_total_tokens // self.config.attention_dp
        self._context_length = min(self._context_length, of_a_group - tokens_beyond(self.config.draft_tokens))
        return self

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
        model = self._model.directory, self._model.vocab_size
        check_requests(requests, self.config, *model, self._context_length, together=together)
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

    def logprobs(
        self,
        sequences: Sequence[Sequence[int]],
        firsts: Sequence[int],
        top: int = 1,
        timeout_s: float | None = None,
    ) -> list[GivenLogprobs]:
        """Log-probs of given tokens at temperature 1, and of the most likely ones in the place of each.

        `firsts` has for each sequence the first token that is asked for, at least 1: nothing comes before token 0.
        `top`: how many of the most likely tokens, at least 1.

        Raises UserError for arguments that are wrong; EngineError while the weights are incomplete.
        """
        host = self._able()
        if len(firsts) != len(sequences):
            raise UserError(f"{len(firsts)} first tokens for {len(sequences)} sequences")
        if not 1 <= top <= self._model.vocab_size:
            raise UserError(f"top is {top}, expected 1 to {self._model.vocab_size}, the vocabulary")
        for index, (sequence, first) in enumerate(zip(sequences, firsts, strict=True)):
            if not 1 <= first < len(sequence) <= self._context_length:
                raise UserError(
                    f"sequence {index} has {len(sequence)} tokens and the first that is asked for is {first}; expected "
                    f"at most the context's {self._context_length}, and one from 1 on"
                )
            check_tokens(f"sequence {index}", sequence, self._model.vocab_size)
        if not sequences:
            return []
        result: list[GivenLogprobs] = host.call(
            "log-probs",
            "logprobs",
            timeout_s if timeout_s is not None else self.config.request_timeout_s,
            responses=len(sequences),
            sequences=[list(sequence) for sequence in sequences],
            firsts=list(firsts),
            top=top,
        )
        return result

    def share_weights(
        self,
        name: str = "engine",
        first_rank: int = 0,
        locations: Sequence[Location] | None = None,
        *,
        drafts: bool = False,
    ) -> list[SharedShards]:
        """Share each rank's memory: the elements of the model in it, and handles by which trainers can map it.

        `name`: how errors call the engine. `first_rank`: of its ranks among those of all engines. `locations`: of each
        rank's memory, where the platform cannot know. `drafts`: True if transfers bring the layer that drafts, too.

        Raises:
            UserError: nothing drafts here.
        """
        if drafts and not self.config.draft_tokens:
            raise UserError("transfers that bring the layer that drafts need draft_tokens, found 0")
        return self._call_ranks(
            "description of weights", "share", name=name, first_rank=first_rank, locations=locations, drafts=drafts
        )

    def weight_bytes(self) -> int:
        """Bytes of all parameters in the memory of the engine's ranks, those in the trainer's memory left out."""
        return sum(self._call_ranks("size of weights", "weight_bytes"))

    def connect_weights(self, orders: Sequence[ReceiveOrder]) -> None:
        """Make ready for what no rank of the trainer writes. `orders`: one for each rank, of `coordinate`."""
        # Beyond the limits of the ranks themselves, whose errors name who was late.
        limits = [2 * order.collective.timeout_s for order in orders if order.collective is not None]
        self._receive_timeout_s = max(limits, default=None)
        self._call_ranks("connection for weights", "connect", self._receive_timeout_s, orders=list(orders))

    def begin_weights(self, version: int, timeout_s: float | None = None, in_flight: InFlightPolicy = "wait") -> None:
        """Begin a transfer: nothing is generated, and the engine's memory may be written, until `commit_weights`.

        `in_flight`: the fate of responses in flight (see `InFlightPolicy`). Requests that come now begin with the new
        weights. A transfer that was never committed may be begun again.
        """
        self._check_weights_are_there()
        timeout_s = timeout_s if timeout_s is not None else self.config.request_timeout_s
        phase = f"begin of weights version {version}"
        self._running().call(phase, "begin_weights", timeout_s, responses=0, in_flight=in_flight)
        self._stale = f"the transfer of version {version} was not committed"
        self._begun, self._sealed = version, False

    def receive_weights(self, version: int) -> list[dict[Transport, Sent]]:
        """Take what no rank of the trainer writes; return when all of it is there.

        Returns:
            Bytes and times of each rank's own reads, by transport.
        """
        self._check_begun(version)
        return self._call_ranks(
            f"transfer of weights version {version}", "receive", self._receive_timeout_s, version=version
        )

    def seal_weights(self, version: int, flush_cache: bool = True, base: AdapterBase | None = None) -> None:
        """Every element of `version` has been written: do all that can fail before it is served.

        What SGLang computes after a load is derived from the new weights. `flush_cache=False` keeps the KV cache of the
        old ones.

        Args:
            version: of the weights.
            flush_cache: drop the KV cache.
            base: the model under adapters.

        Raises:
            EngineError: the adapters came alone, and the engine has another model, or none that a transfer brought.
        """
        self._check_begun(version)
        phase = f"seal of weights version {version}"
        self._call_ranks(phase, "seal", base=base)
        if flush_cache:
            self._call(phase, "drop_old_cache")
        self._sealed = True

    def commit_weights(self, version: int) -> None:
        """Serve what was sealed as `version`. It fails only where the engine has died."""
        self._check_begun(version)
        if not self._sealed:
            raise UserError(f"weights version {version} was not sealed")
        self._call(f"commit of weights version {version}", "commit_weights", version=version)
        self._running().responses.resume()  # before stalls count again
        self._stale = self._begun = None

    def _check_begun(self, version: int) -> None:
        if self._begun != version:
            begun = f", but version {self._begun}" if self._begun is not None else ""
            raise UserError(f"the transfer of weights version {version} was not begun{begun}")

    def verify_weights(self, directory: str | Path) -> list[list[BufferDifference]]:
        """Compare each rank's memory with the weights that SGLang's loader makes of a HuggingFace directory. Returns
        the differences.

        Empty lists prove that all bits are equal, what SGLang derives from its parameters included.
        """
        return self._call_ranks("verification of weights", "verify", directory=str(Path(directory).resolve()))

    def _call_ranks(self, phase: str, method: str, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Call a method of `EngineRank` on every rank; their results in order of rank. Errors name the phase."""
        self._check_weights_are_there()
        timeout_s = timeout_s if timeout_s is not None else self.config.request_timeout_s
        results: list[Any] = self._running().call(phase, "call_ranks", timeout_s, call=Call(method, arguments))
        return results

    @property
    def _changing(self) -> bool:
        """True if a transfer of weights has begun, which requests one by one wait for."""
        return self._begun is not None

    @property
    def context_length(self) -> int:
        """Tokens that a prompt and its response may have together."""
        return self._context_length

    @property
    def log_path(self) -> Path | None:
        """File of the engine's output; None before `start` where no path was given."""
        return self._host.log_path if self._host is not None else self._log_path

    def release_memory(self) -> None:
        """Release the KV cache's memory and drop its contents; needs `RolloutConfig.memory_saver`.

        With `RolloutConfig.release_weights` that of the weights too: then nothing is generated until `restore_memory`
        and a complete transfer. Otherwise weights stay, and nothing is generated until `restore_memory`.
        """
        self._check_memory_saver()
        self._released = True
        if self.config.release_weights:
            self._stale, self._begun, self._sealed = _RELEASED, None, False
        self._call("release of memory", "release_memory", tags=self._saved_memory)

    def restore_memory(self) -> None:
        """Take that memory again."""
        self._check_memory_saver()
        self._call("restore of memory", "restore_memory", tags=self._saved_memory)
        self._released = False
        if self.config.release_weights:
            self._call_ranks("restore of memory", "restore")

    @property
    def _saved_memory(self) -> list[str]:
        """SGLang's names of the memory that is released."""
        return ["kv_cache", "weights"] if self.config.release_weights else ["kv_cache"]

    def _check_weights_are_there(self) -> None:
        if self._released and self.config.release_weights:
            raise EngineError("rollout engine's weights were released with its memory: restore_memory comes first")

    def trace(self, directory: str | Path, steps: int) -> None:
        """Begin a trace of each rank's next steps, as torch.profiler sees them; they continue meanwhile.

        Args:
            directory: for the traces, in Chrome's trace event format; their names end in `-TP-RANK.trace.json.gz`, or
                with more ranks of other kinds after that. They are there once so many steps were made.
            steps: of prefill or decode, each of all requests that run.

        Raises:
            UserError: no steps are asked for.
            EngineError: a trace is in progress. One that waits for its first step is replaced instead.
        """
        if steps < 1:
            raise UserError(f"a trace of {steps} steps of a rollout engine; expected at least 1")
        self._call("trace", "trace", directory=str(Path(directory).resolve()), steps=steps)

    def _call(self, phase: str, method: str, **arguments: Any) -> Any:
        return self._running().call(phase, method, self.config.request_timeout_s, **arguments)

    def _check_memory_saver(self) -> None:
        if not self.config.memory_saver:
            raise UserError("release and restore of memory need rollout.memory_saver=true when the engine is started")

    def _able(self) -> HostProcess:
        """The host process of an engine that can compute."""
        host = self._running()
        if self._stale is not None and host.is_alive:
            raise EngineError(f"rollout engine's weights are not whole, transfer them again: {self._stale}")
        if self._released:
            raise EngineError("rollout engine's KV cache was released: restore_memory comes first")
        return host


class EngineMember(HostOwner):
    """The ranks of an engine on another host than its first: SGLang's front end on that host makes their calls."""

    def __init__(
        self,
        model_dir: str | Path,
        config: RolloutConfig,
        devices: Sequence[int] = (),
        log_path: str | Path | None = None,
        weight_sources: Sequence[Path | None] = (),
        *,
        shard: EngineShard,
    ) -> None:
        """Check everything that can be checked without starting anything. The arguments are those of `RolloutEngine`.

        `shard`: any but the first.
        """
        if shard.index == 0:
            raise UserError("shard 0 of a rollout engine is a RolloutEngine, expected another shard")
        launch.check_shard(config, shard, devices, weight_sources)
        super().__init__(config, log_path)
        self._shard, self._devices = shard, tuple(devices)
        self._model = launch.read_model(Path(model_dir).resolve(), config.loads_weights)
        self._weight_sources = tuple(weight_sources)

    def start(self) -> Self:
        """Start the ranks, and wait until they have met the others and loaded the model.

        Raises:
            EngineError: after `start_timeout_s` at the latest.
        """
        if self._host is not None:
            raise UserError("this shard of the rollout engine was started already")
        self._host = launch.start_host(
            self.config, self._model, self._devices, self._weight_sources, self._shard, self._log_path
        )
        self._host.wait_until_up(self.config.start_timeout_s)
        return self

    def check(self, phase: str) -> None:
        """Raise EngineError, in one line that names the phase, if the ranks are not there."""
        self._running().check(phase)
