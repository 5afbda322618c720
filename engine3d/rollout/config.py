"""Settings of the rollout engine and of sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engine3d.rollout.server_arguments import check_server_arguments
from engine3d.settings import Settings

Seconds = Annotated[float, Field(gt=0)]


class RolloutConfig(Settings):
    """How one SGLang engine is started.

    `context_length` counts prompt and response together; None takes the model's own. `max_total_tokens` is the size of
    the KV cache in tokens; None lets weights and cache fill `mem_fraction_static` of the memory that is free when the
    model is loaded. `server_args` goes to SGLang verbatim, for what has no setting of its own here.
    """

    tp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    context_length: int | None = Field(None, ge=2)
    mem_fraction_static: float = Field(0.7, gt=0, lt=1)
    max_running_requests: int = Field(256, ge=1)
    max_total_tokens: int | None = Field(None, ge=16)
    seed: int = Field(0, ge=0, lt=2**30)
    deterministic: bool = False
    """Sample with a seed for each response, so that a run can be repeated; slower. On CUDA with kernels whose results
    do not depend on the batch; on a CPU the same batch gives the same bits, another batch nearly the same log-probs."""
    cuda_graph: bool = True
    attention_backend: str | None = None
    memory_saver: bool = False
    """Let `release_memory` give the KV cache's memory back while the engine lives; weights stay. CUDA only."""
    start_timeout_s: Seconds = 600
    request_timeout_s: Seconds = 600
    shutdown_timeout_s: Seconds = 30
    server_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.tp % self.ep:
            raise ValueError(
                f"ep is {self.ep} and must divide tp, which is {self.tp}: SGLang cuts experts over its tp ranks"
            )
        check_server_arguments(self.server_args)
        return self


class SamplingConfig(Settings):
    """How tokens are drawn. Temperature 0 takes the most likely token; `top_k` -1 and `min_p` 0 cut nothing off."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    max_new_tokens: int = Field(1024, ge=1)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k} and must be at least 1, or -1 for no limit")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids {list(self.stop_token_ids)} must not be negative")
        return self
