"""One rank of a teacher, on Megatron-Core or an SGLang engine: log-probs of the tokens that a student wrote."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from engine3d.rollout.config import RolloutConfig
from engine3d.rollout.engine import RolloutEngine
from engine3d.training.passes.sequences import CHOSEN
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.roles.model import ModelWorker, of_responses, to_sequences
from hybridflow.rundir.status.watching import TEACHER_ENGINES
from hybridflow.workers.context import WorkerContext
from hybridflow.workers.protocols import ONE_TO_ALL, THREE_D_PROTO, register


class TeacherWorker(ModelWorker):
    """One rank of a teacher on Megatron-Core, which is never trained."""

    @register(THREE_D_PROTO, exclusive=True)
    def teacher_logprobs(self, batch: SampleBatch, *, temperature: float, top_k: int) -> Columns | None:
        """Return the `teacher_columns` of the teacher's log-probs.

        Args:
            batch: the responses, with `chosen_tokens` where log-probs of given tokens are requested.
            temperature: the logits are divided by it, as they were when the tokens were sampled.
            top_k: number of most likely tokens to return, where no tokens are given; 0 for none.
        """
        began = time.perf_counter()
        given = {} if batch.chosen_tokens is None else {CHOSEN: batch.chosen_tokens}
        outputs = self._engine.logprobs(
            to_sequences(batch, routes=None, **given), temperature=temperature, top=1 if given else max(1, top_k)
        )
        if outputs is None:
            return None
        assert outputs.logprobs is not None and outputs.top_tokens is not None and outputs.chosen_logprobs is not None
        return teacher_columns(
            batch,
            self._name,
            outputs.logprobs,
            outputs.top_tokens,
            outputs.chosen_logprobs if given or top_k else None,
            time.perf_counter() - began,
        )


def teacher_columns(
    batch: SampleBatch,
    name: str,
    logprobs: Tensor,
    top_tokens: Tensor,
    chosen_logprobs: Tensor | None,
    seconds: float,
) -> Columns:
    """Make the columns of `Step.teacher_logprobs` from the outputs of a teacher of any kind.

    Args:
        batch: the responses, with `chosen_tokens` where those were given.
        name: of the teacher, for errors.
        logprobs: (T,) float32 of each token of `to_sequences(batch)`.
        top_tokens: (T, k) int64: the teacher's most likely tokens at each position, by falling probability.
        chosen_logprobs: (T, K) float32 of the `chosen_tokens`, or of the top tokens; None where not requested.
        seconds: of the computation, for the note.

    Raises:
        EngineError: a log-prob at the position of a token that the policy wrote is not finite; names its sample.
    """
    what = f"{name}: the log-prob"
    best, written = top_tokens[batch.is_response], batch.tokens[batch.is_response]
    columns = {
        "teacher_logprobs": of_responses(batch, logprobs, what),
        "teacher_agrees": (best[:, 0] == written).float(),
    }
    if chosen_logprobs is not None:
        columns["teacher_chosen_logprobs"] = of_responses(batch, chosen_logprobs, f"{what} of a chosen token")
        if batch.chosen_tokens is None:
            columns["chosen_tokens"] = best
    return Columns(columns, note=seconds)


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
