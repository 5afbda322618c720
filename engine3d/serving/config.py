"""Settings of an SGLang server whose model does not learn."""

from __future__ import annotations

import difflib
import json
from typing import Any, Literal

from pydantic import Field, model_validator

from engine3d.rollout.config import Seconds
from engine3d.rollout.server_arguments import server_argument_names
from engine3d.settings import MOST_RANKS, MOST_TOKENS, Settings

_OWNED = {
    "model_path": "the model's directory",
    "tokenizer_path": "nothing: the tokenizer is the model directory's",
    "served_model_name": "nothing: it is the model's directory",
    "tp_size": "tp",
    "ep_size": "ep",
    "dp_size": "nothing: a server is one replica; give it devices for several",
    "pp_size": "nothing: a server's devices are cut by tp",
    "nnodes": "nothing: a server is on one host",
    "node_rank": "nothing: a server is on one host",
    "dtype": "dtype",
    "context_length": "context_length",
    "mem_fraction_static": "mem_fraction_static",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "disable_cuda_graph": "cuda_graph",
    "device": "nothing: the placement says on which devices it is",
    "base_gpu_id": "nothing: the placement says on which devices it is",
    "host": "nothing: it listens where the run's hosts reach it",
    "port": "nothing: it takes a free one",
    "api_key": "nothing: each run makes one",
    "admin_api_key": "nothing: each run makes a key",
    "tokenizer_worker_num": "nothing: SGLang takes no key with several",
    "skip_tokenizer_init": "nothing: it reads and writes text",
    "is_embedding": "nothing: it generates",
    "skip_server_warmup": "nothing: it is asked whether it generates before it is used",
}
"""SGLang's argument -> what to set instead."""


class ServerConfig(Settings):
    """Settings of an SGLang server. Its weights stay those of its directory."""

    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Tensor parallel size: the devices of one server."""
    ep: int = Field(1, ge=1, le=MOST_RANKS)
    """Expert parallel size; it divides tp."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the weights and the KV cache; if auto that of the model's files, float16 for float32."""
    context_length: int | None = Field(None, ge=2, le=MOST_TOKENS)
    """Most tokens of a question and its answer together; the model's own limit if null."""
    mem_fraction_static: float = Field(0.85, gt=0, lt=1)
    """Share of the memory that is free when the model is loaded, for weights and KV cache."""
    max_running_requests: int = Field(64, ge=1, le=1 << 20)
    """Most requests that are answered at the same time; others wait."""
    max_total_tokens: int | None = Field(None, ge=16, le=1 << 40)
    """Size of the KV cache in tokens; as large as the requests need, and as there is room for, if null."""
    cuda_graph: bool = True
    """Capture CUDA graphs of decoding; false decodes eagerly."""
    start_timeout_s: Seconds = 600
    """Limit of its start."""
    shutdown_timeout_s: Seconds = 30
    """Limit of an orderly end, after which it is killed."""
    server_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of SGLang's `ServerArgs`, verbatim: nothing that is learned from depends on them."""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        if self.tp % self.ep:
            raise ValueError(
                f"ep is {self.ep} and must divide tp, which is {self.tp}: SGLang cuts experts over its tp ranks"
            )
        for name in self.server_args:
            if name in _OWNED:
                raise ValueError(f"server_args.{name} is not set here; set {_OWNED[name]}")
            if name not in server_argument_names():
                near = difflib.get_close_matches(name, server_argument_names(), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"server_args.{name} is not an argument of SGLang's ServerArgs{hint}")
        try:
            json.dumps(self.server_args)
        except (TypeError, ValueError) as error:
            raise ValueError(f"server_args: {error}, expected what JSON has") from None
        return self
