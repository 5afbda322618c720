"""A teacher that an SGLang engine serves: its weights are its own, and no transfer ever writes them."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.engine import RolloutEngine
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.roles.teacher import teacher_columns
from hybridflow.rundir.status.watching import TEACHER_ENGINES
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, THREE_D_PROTO, register


class TeacherEngineWorker:
    """One engine; the ranks of its group are several engines.

    Args:
        directory: HuggingFace directory of the teacher.
        config: of every engine.
    """

    def __init__(self, context: WorkerContext, directory: Path, config: RolloutConfig) -> None:
        path = context.log_path
        log_path = path.with_name(f"{TEACHER_ENGINES}-{context.rank}.log") if path is not None else None
        self._name = f"{context.role} rank {context.rank}"
        self._engine = RolloutEngine(directory, config, context.devices, log_path)

    @register(ONE_TO_ALL)
    def start(self) -> None:
        """Start the engine and wait until it can compute."""
        self._engine.start()

    @register(THREE_D_PROTO, exclusive=True)
    def teacher_logprobs(self, batch: SampleBatch, *, temperature: float, top_k: int) -> Columns:
        """Compute `TeacherWorker.teacher_logprobs` without given tokens and at temperature 1."""
        assert batch.chosen_tokens is None and temperature == 1, "refused by `Recipe`"
        began = time.perf_counter()
        pairs = zip(batch.prompts(), batch.responses(), strict=True)
        requests = [(prompt + response, len(prompt)) for prompt, response in pairs if response]
        outputs = self._engine.logprobs(
            [tokens for tokens, _ in requests], [first for _, first in requests], top=max(1, top_k)
        )
        is_response = batch.is_response
        logprobs = torch.zeros(len(is_response))
        chosen = torch.zeros(len(is_response), max(1, top_k))
        best = torch.zeros(chosen.shape, dtype=torch.int64)
        if outputs:
            logprobs[is_response] = torch.tensor([logprob for output in outputs for logprob in output.logprobs])
            chosen[is_response] = torch.tensor([row for output in outputs for row in output.top_logprobs])
            best[is_response] = torch.tensor([row for output in outputs for row in output.top_tokens])
        seconds = time.perf_counter() - began
        return teacher_columns(batch, self._name, logprobs, best, chosen if top_k else None, seconds)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
