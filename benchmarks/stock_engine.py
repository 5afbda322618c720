"""SGLang's own engine in a process of its own: the one to which other systems hand weights in buckets."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine3d.errors import EngineError
from engine3d.rollout import RolloutConfig, SamplingConfig, launch
from engine3d.rollout.host.generation import sampling_parameters
from engine3d.rollout.requests import Request

_LIMIT_S = 600.0


class StockEngine:
    """One engine, without the project's hooks.

    Args:
        model: directory with config.json.
        config: of the engine.
        devices: of its ranks; empty for CPU slots.
        log_path: for all that its processes print.
    """

    def __init__(self, model: Path, config: RolloutConfig, devices: tuple[int, ...], log_path: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._log_path = log_path
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, config, devices, log_path))
        self._process.start()
        theirs.close()

    def wait_until_up(self) -> None:
        self._answer()

    def start_update(self, payloads: list[str]) -> None:
        """Hand a bucket over without waiting. `payloads`: for each rank, as `gather_baseline.serialized` makes it."""
        arguments = {"named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
        self._connection.send(("update_weights_from_tensor", arguments))

    def wait_until_updated(self) -> None:
        succeeded, message = self._answer()
        if not succeeded:
            raise EngineError(f"SGLang refuses a bucket: {message}; log: {self._log_path}")

    def flush_cache(self) -> None:
        self._call("flush_cache")

    def logprobs(self, prompt: Sequence[int], sampling: SamplingConfig) -> list[float]:
        """Log-probs of the tokens of a response."""
        parameters = sampling_parameters(Request(0, prompt, sampling), None)
        output = self._call("generate", input_ids=list(prompt), sampling_params=parameters, return_logprob=True)
        return [logprob for logprob, _, _ in output["meta_info"]["output_token_logprobs"]]

    def shutdown(self) -> None:
        self._connection.close()
        self._process.join(_LIMIT_S)

    def _call(self, method: str, **arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._connection.poll(_LIMIT_S):
            raise EngineError(f"SGLang did not answer within {_LIMIT_S:.0f} s; log: {self._log_path}")
        try:
            return self._connection.recv()
        except EOFError:
            raise EngineError(f"SGLang's process has ended; log: {self._log_path}") from None


def _serve(
    connection: Connection, model: Path, config: RolloutConfig, devices: tuple[int, ...], log_path: Path
) -> None:
    os.setsid()  # SGLang kills the process tree of the parent of a process that fails
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    model_info = launch.read_model(model, weights_needed=False)
    os.environ.update(launch.environment(config, model_info, devices))
    import sglang

    engine = sglang.Engine(**launch.server_arguments(config, model_info))
    connection.send(None)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            break
        connection.send(getattr(engine, method)(**arguments))
    engine.shutdown()
