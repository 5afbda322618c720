"""Requests as SGLang takes them, and its outputs as responses."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine3d.errors import EngineError
from engine3d.rollout.cache import samples_together
from engine3d.rollout.config import SamplingConfig
from engine3d.rollout.requests import Request, Response
from engine3d.rollout.scheduler.routes import ROUTES
from engine3d.rollout.scheduler.text_stops import PARAMETER
from engine3d.rollout.scheduler.versions import VERSIONS

ADAPTER_VARIABLE = "ENGINE3D_ROLLOUT_ADAPTER"
"""Environment variable of an engine with an adapter: its config as PEFT has it, in JSON."""
_ADAPTER = "policy"

if TYPE_CHECKING:
    import numpy as np

    from engine3d.models.experts.routes import RouteFormat


def adapter_name() -> str | None:
    """SGLang's name of the adapter of all requests; None without one."""
    return _ADAPTER if ADAPTER_VARIABLE in os.environ else None


async def add_adapter(manager: Any) -> None:
    """Make SGLang's adapter, with zeros for its values until the first transfer.

    Args:
        manager: SGLang's tokenizer manager.

    Raises:
        EngineError: SGLang refuses it.
    """
    from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    request = LoadLoRAAdapterFromTensorsReqInput(
        lora_name=_ADAPTER,
        config_dict=json.loads(os.environ[ADAPTER_VARIABLE]),
        serialized_tensors=MultiprocessingSerializer.serialize({}, output_str=True),
        pinned=True,
    )
    result = await manager.load_lora_adapter_from_tensors(request)
    if not result.success:
        raise EngineError(f"SGLang takes no adapter: {result.error_message}")


class SglangBatches:
    """Requests that reach SGLang's scheduler in one message, and whose outputs are waited for together.

    Args:
        engine: SGLang's.
        token_versions: True if each token has the version of the weights that drew it.
        routes: format of the routes that come with responses; None without any.
    """

    def __init__(self, engine: Any, *, token_versions: bool, routes: RouteFormat | None) -> None:
        self._engine, self._token_versions, self._routes = engine, token_versions, routes
        arguments = engine.tokenizer_manager.server_args
        self._groups = int(arguments.dp_size)  # of ranks, with attention and a KV cache of their own
        self._most_running = int(arguments.max_running_requests)
        self._names: dict[int, list[str]] = {}

    @property
    def done(self) -> dict[int, int]:
        """Outputs that are complete, by the id of the call that waits for them."""
        in_flight = self._engine.tokenizer_manager.rid_to_state
        return {id: sum(name not in in_flight for name in names) for id, names in self._names.items()}

    async def generate(
        self, id: int, requests: Sequence[Request], names: Sequence[str], parameters: Sequence[dict[str, Any]]
    ) -> list[Response]:
        """Responses in the order of their requests.

        Args:
            id: of the call.
            requests: those of a group follow each other.
            names: SGLang's names of them.
            parameters: SGLang's sampling parameters of each.
        """
        draws = [len(list(draw)) for _, draw in itertools.groupby(request.group for request in requests)]
        order = submission_order(draws, self._most_running)
        together = samples_together(len(draws), max(draws), self._groups)
        outputs = await self.outputs(
            id,
            [names[index] for index in order],
            [index // together % self._groups for index in order],
            input_ids=[list(requests[index].prompt) for index in order],
            sampling_params=[parameters[index] for index in order],
            return_routed_experts=self._routes is not None,
        )
        by_index = dict(zip(order, outputs, strict=True))
        return [
            drawn(
                by_index[index]["meta_info"],
                token_versions=self._token_versions,
                routes=self._routes,
                tokens_before=len(request.prompt),
            )
            for index, request in enumerate(requests)
        ]

    async def outputs(
        self,
        id: int,
        names: Sequence[str],
        groups: Sequence[int],
        return_routed_experts: bool = False,
        **per_request: list[Any],
    ) -> list[dict[str, Any]]:
        """SGLang's outputs, in the order of `names`.

        Args:
            id: of the call.
            names: SGLang's names of the requests.
            groups: for each request, the group of the engine's ranks with attention of their own that computes it.
            return_routed_experts: True if outputs have routes.
            per_request: further arguments of `async_generate`, with an entry for each request.
        """
        calls, indices = [], []
        for group in sorted(set(groups)):
            of_group = [index for index, other in enumerate(groups) if other == group]
            arguments: dict[str, Any] = {
                name: [values[index] for index in of_group] for name, values in per_request.items()
            }
            if self._groups > 1:
                arguments["routed_dp_rank"] = group
            rids = [names[index] for index in of_group]
            arguments["return_routed_experts"] = return_routed_experts
            if (adapter := adapter_name()) is not None:
                arguments["lora_path"] = [adapter] * len(of_group)
            calls.append(self._engine.async_generate(rid=rids, return_logprob=True, **arguments))
            indices += of_group
        self._names[id] = list(names)
        try:
            outputs = [output for of_group in await asyncio.gather(*calls) for output in of_group]
        finally:
            del self._names[id]
        by_index = dict(zip(indices, outputs, strict=True))
        return [by_index[index] for index in range(len(names))]


def submission_order(draws: Sequence[int], running: int) -> list[int]:
    """Order in which samples of several draws are sent, by their indices.

    A prompt is computed once for all its samples only where the first is in flight before the others come. So of the
    prompts that run at the same time, the first samples come first. The others come prompt by prompt: a batch keeps
    this order, and a GPU whose processors read the same prompt's cache at the same time has it from its own cache.

    Args:
        draws: number of samples of each draw. The samples are numbered draw by draw.
        running: most requests that run at the same time.
    """
    ends = list(itertools.accumulate(draws))
    samples = [range(end - count, end) for end, count in zip(ends, draws, strict=True)]
    block = max(1, running // max(draws))
    order: list[int] = []
    for start in range(0, len(samples), block):
        order += [of_draw[0] for of_draw in samples[start : start + block]]
        order += [index for of_draw in samples[start : start + block] for index in of_draw[1:]]
    return order


def sampling_parameters(request: Request, engine_seed: int | None) -> dict[str, Any]:
    """SGLang's sampling parameters of a request. `engine_seed`: that of a deterministic engine; None of another."""
    parameters = _parameters(request.sampling)
    if engine_seed is None:
        return parameters
    return {**parameters, "sampling_seed": sample_seed(engine_seed, request.group, request.index)}


@lru_cache(maxsize=4096)
def _parameters(sampling: SamplingConfig) -> dict[str, Any]:
    parameters = sampling.model_dump(exclude={"stop", "stop_token_ids"})
    parameters |= {"stop_token_ids": list(sampling.stop_token_ids), "skip_special_tokens": False}
    return parameters | ({"custom_params": {PARAMETER: list(sampling.stop)}} if sampling.stop else {})


def sample_seed(engine_seed: int, group: int, index: int) -> int:
    """A seed of 31 bits for one sample. A hash, so that neighbours share nothing."""
    digest = hashlib.blake2b(f"{engine_seed}/{group}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def drawn(
    meta: dict[str, Any], *, token_versions: bool, routes: RouteFormat | None = None, tokens_before: int = 0
) -> Response:
    """Response of an output, from SGLang's `meta_info`.

    Args:
        meta: of the output.
        token_versions: True if each token has a version of its own; otherwise all are of the version that is served.
        routes: format of its routes; None without any.
        tokens_before: those before it whose routes it has, too.

    Raises:
        EngineError: its tokens have other numbers of versions or of routes.
    """
    reason, tokens = meta["finish_reason"]["type"], meta.get("output_token_logprobs") or []
    if token_versions:
        versions = [int(version) for version in meta.get(VERSIONS) or []]
    else:
        versions = [int(meta["weight_version"])] * len(tokens)
    if reason == "abort" and routes is not None and ROUTES not in meta:
        versions = []
    # An abort in SGLang's queue has tokens and neither versions nor routes: they are drawn again.
    if len(versions) != len(tokens):
        if reason != "abort":
            raise EngineError(f"{len(tokens)} tokens and {len(versions)} versions")
        tokens, versions = [], []
    return Response(
        [int(token) for _, token, _ in tokens],
        [float(logprob) for logprob, _, _ in tokens],
        versions,
        reason,
        routes=None if routes is None or not versions else _routes(meta, tokens_before + len(tokens) - 1, routes),
    )


def _routes(meta: dict[str, Any], rows: int, format: RouteFormat) -> np.ndarray[Any, Any]:
    import numpy as np

    values = np.frombuffer(base64.b64decode(meta.get(ROUTES) or ""), np.dtype(str(format.dtype).removeprefix("torch.")))
    if values.size != rows * format.columns:
        raise EngineError(f"{values.size} entries of routes, expected {format.columns} for each of {rows} tokens")
    return values.reshape(rows, format.columns)
