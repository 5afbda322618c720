"""Settings of the rollout engine and of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import AfterValidator, Field, model_validator

from engine3d.dtypes import ITEMSIZES
from engine3d.models.precision import SetPrecision
from engine3d.rollout.cache import SPARE_REQUESTS
from engine3d.rollout.server_arguments import check_attention_backend, check_server_arguments
from engine3d.settings import LONGEST_S, MOST_RANKS, MOST_TOKENS, Settings

Seconds = Annotated[float, Field(gt=0, le=LONGEST_S)]

LEAST_TEMPERATURE = 1e-6
"""SGLang samples with none below, and its log-probs are then of temperature 1."""

MOST_REQUESTS = 1024
"""Most requests in flight in a group of ranks with `cascade_attention`: each is compared with all others."""

MOST_DRAFT_TOKENS = 8
"""Most tokens that are drafted ahead: beyond, hardly any would be accepted."""

ADAPTER_SLOTS = 2
"""Slots of SGLang's pool of adapters: of the adapter, and of requests without one, so that neither is ever evicted."""

_OTHER_GRAPHS = "cuda_graph_max_bs_decode"
"""SGLang's argument that sets other batch sizes for CUDA graphs than the platform's."""

_NOT_WITH_PRECISION = (
    "fused_sampling",
    "peer_collectives",
    "cascade_attention",
    "local_experts_only",
    "release_weights",
)
_NOT_WITH_KV_CACHE_DTYPE = ("peer_collectives", "cascade_attention", "memory_saver")
_NOT_WITH_DRAFTS = {
    "deterministic": "a token is drawn by its seed, and a draft accepted by another number",
    "fused_sampling": "its kernel draws one token of a request",
    "attention_dp": None,
    "precision": None,
    "kv_cache_dtype": None,
    "cascade_attention": None,
    "local_experts_only": None,
    "routes": "SGLang counts no routes of accepted drafts",
    "release_weights": "no transfer brings the drafting layer back",
}
"""Settings that do not go with drafts, and the reason; None where they were not tried."""
_WITH_PRECISION = {"load_format", "chunked_prefill_size", "max_prefill_tokens", _OTHER_GRAPHS}
"""SGLang's arguments that do not choose its kernels."""
_WITH_DRAFTS = _WITH_PRECISION - {_OTHER_GRAPHS} | {
    "schedule_policy",
    "schedule_conservativeness",
    "watchdog_timeout",
    "decode_log_interval",
    "log_level",
}
"""SGLang's arguments that choose neither its kernels nor how weights lie in memory."""


class RolloutConfig(Settings):
    """Configuration of one SGLang engine.

    `context_length` counts prompt and response together; None takes the model's own.

    `max_total_tokens` is the size of the KV cache in tokens; None makes it as large as `max_running_requests` of
    `context_length` tokens need (a recipe knows how many there will be, and how long). It is smaller where weights and
    cache would take more than `mem_fraction_static` of the memory that is free when the model is loaded.

    `server_args` goes to SGLang verbatim, for what has no setting of its own here: what `server_arguments.ACCEPTED`
    names, and nothing else.
    """

    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Tensor parallel size: the devices of one engine."""
    ep: int = Field(1, ge=1, le=MOST_RANKS)
    """Expert parallel size; it divides tp."""
    attention_dp: int = Field(1, ge=1, le=MOST_RANKS)
    """Data parallel size of attention; it divides tp. The ranks are so many groups, each of which computes attention
    and output layer for requests of its own and has the KV cache of these alone; experts are cut over all ranks as
    without. A rank holds more weights then."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the weights, and of the KV cache unless `kv_cache_dtype` is set."""
    precision: SetPrecision = None
    """Precision of quantised weights: `fp8` for the matrices of attention and MLPs, in blocks of 128 x 128. The actor
    quantises them for each version; without one the model's files are in fp8. All weights are in `dtype` if null."""
    kv_cache_dtype: Literal["fp8_e4m3", "fp8_e5m2"] | None = None
    """Format of keys and values in the KV cache, by SGLang's names: a byte an element, without scales. They are in
    `dtype` if null."""
    context_length: int | None = Field(None, ge=2, le=MOST_TOKENS)
    """Most tokens of prompt and response together; the model's own limit if null."""
    mem_fraction_static: float = Field(0.7, gt=0, lt=1)
    """Share of the memory that is free when the model is loaded, for weights and KV cache."""
    max_running_requests: int = Field(256, ge=1, le=1 << 20)
    """Most requests that are generated at the same time; others wait."""
    max_total_tokens: int | None = Field(None, ge=16, le=1 << 40)
    """Size of the KV cache in tokens; as large as the requests need if null."""
    seed: int = Field(0, ge=0, lt=2**30)
    """Seed of the sampled tokens; the run's seed is added to it."""
    deterministic: bool = False
    """Sample with a seed for each response, so that a run can be repeated; slower. On CUDA with kernels whose results
    do not depend on the batch; on a CPU the same batch gives the same bits, another batch nearly the same log-probs."""
    fused_sampling: bool = False
    """Draw tokens and their log-probs by one kernel, which reads the logits once and makes no other tensor as large.
    The distribution is the same, the random numbers are others. Not with `deterministic`; a batch with a response of
    the most likely tokens, or by top_k, top_p or min_p, is drawn as without it."""
    peer_collectives: bool = False
    """Write a decoding step's tokens into the memory of other ranks by kernels, where NCCL takes longer to start than
    to send them; only with `attention_dp`. Sums over ranks are in float32.
    """
    cascade_attention: bool = False
    """On GPUs of compute capability 8 and 9 (FlashAttention-3): a decoding step reads the pages of the KV cache that
    several requests share, as the samples of a prompt do, once for a tile of them."""
    local_experts_only: bool = False
    """Leave out rows of other ranks' experts, for which SGLang computes zeros and adds them up; only with `ep`, on
    GPUs. Sums over a rank's experts are in float32.
    """
    draft_tokens: int = Field(0, ge=0, le=MOST_DRAFT_TOKENS)
    """Tokens that a model's layer for multi-token prediction drafts ahead of each decoding step (speculative decoding);
    0 for none. The step accepts as many as the policy draws, and draws one more: the distribution and the log-probs are
    the policy's, the random numbers are others."""
    cuda_graph: bool = True
    """Capture CUDA graphs of decoding; false decodes eagerly."""
    attention_backend: Annotated[str, AfterValidator(check_attention_backend)] | None = None
    """One of `server_arguments.ATTENTION_BACKENDS`; SGLang's own choice for the device and the model if null."""
    token_versions: bool = False
    """Note with each token which version of the weights drew it, as a stream of responses needs."""
    routes: bool = False
    """Return the experts of every token with the responses of a model with experts."""
    memory_saver: bool = False
    """Release the KV cache's memory in `release_memory`, while the engine lives."""
    release_weights: bool = False
    """Release the weights' memory, too; only with `memory_saver`. The next transfer restores them: the engine's ranks
    read them from the trainer's memory, and nothing is generated before it is complete.
    """
    start_timeout_s: Seconds = 600
    """Limit of the start of an engine."""
    request_timeout_s: Seconds = 600
    """Limit of a call of the engine; while it generates, of the time without a new token of any request. Responses may
    take as long as they come further."""
    shutdown_timeout_s: Seconds = 30
    """Limit of an orderly end of an engine, after which it is killed."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of SGLang, by their names there, of those in `server_arguments.ACCEPTED`."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.tp % self.ep:
            raise ValueError(
                f"ep is {self.ep} and must divide tp, which is {self.tp}: SGLang cuts experts over its tp ranks"
            )
        if self.tp % self.attention_dp:
            raise ValueError(f"attention_dp is {self.attention_dp} and must divide tp, which is {self.tp}")
        if 1 < self.attention_dp == self.ep < self.tp:
            raise ValueError(
                f"ep and attention_dp are both {self.ep}, and tp is {self.tp}: SGLang fails there, expected others"
            )
        for name in ("deterministic", "token_versions", "release_weights"):
            if self.attention_dp > 1 and getattr(self, name):
                raise ValueError(
                    f"attention_dp={self.attention_dp} was not tried with {name}=true, expected one of them"
                )
        if self.peer_collectives and self.attention_dp == 1:
            raise ValueError("peer_collectives=true does nothing with attention_dp=1, expected false")
        if self.local_experts_only and self.ep == 1:
            raise ValueError("local_experts_only=true does nothing with ep=1, expected false")
        if self.local_experts_only and self.deterministic:
            raise ValueError("local_experts_only=true was not tried with deterministic=true, expected one of them")
        if self.precision is not None:
            self._check_precision()
        if self.kv_cache_dtype is not None:
            self._check_kv_cache()
        if self.cascade_attention:
            self._check_cascade_attention()
        if self.release_weights and not self.memory_saver:
            raise ValueError("release_weights=true needs memory_saver=true")
        if self.fused_sampling and self.deterministic:
            raise ValueError("fused_sampling=true draws without the seeds that deterministic=true needs, expected one")
        check_server_arguments(self.server_args)
        if self.draft_tokens:
            self._check_drafts()
        if self.routes and (errors := self.route_errors()):
            raise ValueError(errors[0])
        return self

    def route_errors(self) -> list[str]:
        """Settings with which routes do not go."""
        errors = []
        if self.server_args.get("chunked_prefill_size") == -1:
            errors.append(
                "server_args.chunked_prefill_size=-1 with routes=true: there is memory for the routes of as many "
                "tokens as are read at a time, expected a whole number of at least 1"
            )
        if self.server_args.get("enable_torch_compile"):
            errors.append("server_args.enable_torch_compile=true was not tried with routes=true, expected one of them")
        return errors

    def _check_precision(self) -> None:
        if self.dtype != "bfloat16":
            raise ValueError(f"precision={self.precision} with dtype={self.dtype}, expected bfloat16")
        settings = {name: getattr(self, name) for name in _NOT_WITH_PRECISION}
        settings["attention_dp"] = self.attention_dp > 1
        for name, is_set in settings.items():
            if is_set:
                raise ValueError(
                    f"precision={self.precision} was not tried with {name}={_text(getattr(self, name))}, expected one "
                    "of them"
                )
        if others := sorted(self.server_args.keys() - _WITH_PRECISION):
            raise ValueError(f"precision={self.precision} was not tried with server_args.{others[0]}, expected none")
        if (given := self.server_args.get("load_format", "dummy")) != "dummy":
            raise ValueError(
                f"precision={self.precision} with server_args.load_format={given}: the actor quantises the weights, "
                "expected dummy; engines without an actor load files in fp8 without it"
            )

    def _check_drafts(self) -> None:
        for name, reason in _NOT_WITH_DRAFTS.items():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                why = "was not tried" if reason is None else "is refused"
                raise ValueError(
                    f"draft_tokens={self.draft_tokens} {why} with {name}={_text(value)}"
                    f"{'' if reason is None else f': {reason}'}; expected one of them"
                )
        if others := sorted(self.server_args.keys() - _WITH_DRAFTS):
            raise ValueError(
                f"draft_tokens={self.draft_tokens} was not tried with server_args.{others[0]}, expected one of them"
            )

    def _check_kv_cache(self) -> None:
        settings = {name: getattr(self, name) for name in _NOT_WITH_KV_CACHE_DTYPE}
        settings["attention_dp"] = self.attention_dp > 1
        for name, is_set in settings.items():
            if is_set:
                raise ValueError(
                    f"kv_cache_dtype={self.kv_cache_dtype} was not tried with {name}={_text(getattr(self, name))}, "
                    "expected one of them"
                )

    @property
    def altered_policy(self) -> dict[str, str]:
        """Settings by which the engine draws from another policy than that of its `dtype`, with their values."""
        settings = {"precision": self.precision, "kv_cache_dtype": self.kv_cache_dtype}
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def cache_itemsize(self) -> int:
        """Bytes of an element of the KV cache."""
        return ITEMSIZES[self.dtype] if self.kv_cache_dtype is None else 1

    @property
    def loads_weights(self) -> bool:
        """True if the engine starts with the weights of its model's files."""
        return self.server_args.get("load_format") != "dummy"

    def _check_cascade_attention(self) -> None:
        for name in ("deterministic", "token_versions"):
            if getattr(self, name):
                raise ValueError(f"cascade_attention=true was not tried with {name}=true, expected one of them")
        if self.attention_dp > 1:
            uncaptured = {"cuda_graph=false": not self.cuda_graph, f"server_args.{_OTHER_GRAPHS}": self.has_own_graphs}
            if refused := [name for name, given in uncaptured.items() if given]:
                raise ValueError(
                    f"cascade_attention=true was not tried with attention_dp={self.attention_dp} and {refused[0]}: "
                    "expected CUDA graphs of all batches"
                )
        if self.attention_backend not in (None, "fa3"):
            raise ValueError(
                f"cascade_attention=true with attention_backend={self.attention_backend}, expected fa3, or null"
            )
        if self.requests_of_a_group > MOST_REQUESTS:
            raise ValueError(
                f"cascade_attention=true with {self.requests_of_a_group:,} requests at the same time "
                f"(max_running_requests/attention_dp), expected at most {MOST_REQUESTS:,}"
            )

    @property
    def has_own_graphs(self) -> bool:
        """True if the user sets the batch sizes for which decoding is captured."""
        return _OTHER_GRAPHS in self.server_args

    @property
    def attention_kernels(self) -> str | None:
        """SGLang's name of its attention backend; None where it chooses."""
        return "fa3" if self.cascade_attention else self.attention_backend

    @property
    def attention_tp(self) -> int:
        """Ranks over which attention is cut."""
        return self.tp // self.attention_dp

    @property
    def requests_of_a_group(self) -> int:
        """Most requests that a group of ranks with attention of its own generates at the same time."""
        return -(-self.max_running_requests // self.attention_dp)

    @property
    def most_requests(self) -> int:
        """Requests that SGLang may run at once, in each group of ranks with attention of its own."""
        return self.requests_of_a_group + (0 if self.has_own_graphs else SPARE_REQUESTS)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Alterations(Settings):
    """Settings that change the distribution tokens are drawn from, besides the temperature; none does by default.

    An engine's log-probs are those of softmax(logits / temperature): what `top_p`, `top_k` and `min_p` cut off stays in
    them, and the penalties, which change logits, are in them too. So tokens that are drawn with any of these are drawn
    from another distribution than a trainer's log-probs are of.
    """

    top_p: float = Field(1.0, gt=0, le=1)
    """Draw from the most likely tokens that together have this probability."""
    top_k: int = Field(-1, le=MOST_TOKENS)
    """Number of most likely tokens to draw from; -1 for no limit."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Draw from tokens whose probability is at least this share of the most likely one's."""
    repetition_penalty: float = Field(1.0, gt=0, le=2)
    """Divides the logit of every token that the response has already, or multiplies it where it is negative."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Taken from the logit of every token that the response has already."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """The same, as often as the response has the token."""

    @model_validator(mode="after")
    def _check_alterations(self) -> Self:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k} and must be at least 1, or -1 for no limit")
        if self.repetition_penalty != 1 and (self.presence_penalty or self.frequency_penalty):
            raise ValueError(
                "repetition_penalty is set with presence_penalty or frequency_penalty, which SGLang applies in an "
                "order that is another in every process, expected one or the other"
            )
        return self

    @property
    def altered(self) -> dict[str, float]:
        """Settings whose values change the distribution, with these values."""
        return {name: value for name, neutral in NEUTRAL.items() if (value := getattr(self, name)) != neutral}


class Sampling(Protocol):
    """Sampling of responses, by their prompts."""

    def for_prompt(self, tokens: int) -> SamplingConfig:
        """Sampling of a prompt of `tokens` tokens."""


NEUTRAL: Mapping[str, float] = {name: field.default for name, field in Alterations.model_fields.items()}
"""The values that change nothing."""


class SamplingConfig(Alterations):
    """Sampling of tokens. Temperature 0 takes the most likely token."""

    temperature: float = Field(1.0, ge=0, le=100)
    """Divides the logits; 0 takes the most likely token, which only an evaluation may."""
    max_new_tokens: int = Field(1024, ge=1, le=MOST_TOKENS)
    """Most tokens of a response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which a response ends, besides the model's own."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts at which a response ends, with the token that completes one: it is a part of the response. They need a
    tokenizer in the model's directory."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token, up to max_new_tokens."""

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature is {self.temperature}, which SGLang takes for 0, expected 0 or at least "
                f"{LEAST_TEMPERATURE}"
            )
        if self.top_k == 1 and self.temperature not in (0, 1):
            raise ValueError(
                f"top_k is 1, of which SGLang gives log-probs at temperature 1 and not at {self.temperature}, expected "
                "temperature 0 for the most likely token"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids {list(self.stop_token_ids)} must not be negative")
        return self

    def for_prompt(self, tokens: int) -> SamplingConfig:
        """Return the same sampling for every prompt."""
        return self
