"""One SGLang engine, as a role of the dataflow."""

from __future__ import annotations

from pathlib import Path

from engine3d.rollout.config import RolloutConfig, SamplingConfig
from engine3d.rollout.engine import RolloutEngine
from engine3d.rollout.messages import Generation
from hybridflow.protocols import DP_PROTO, ONE_TO_ALL, register
from hybridflow.rank_process import WorkerContext


class RolloutWorker:
    """One engine; the ranks of its group are engines side by side.

    Args:
        directory: HuggingFace directory of the initial weights.
        config: of every engine.
    """

    def __init__(self, context: WorkerContext, directory: Path, config: RolloutConfig) -> None:
        log_path = context.log_path.with_name(f"sglang-{context.rank}.log") if context.log_path else None
        self._engine = RolloutEngine(directory, config, context.devices, log_path)

    @register(ONE_TO_ALL)
    def start(self) -> None:
        """Start the engine and wait until it can generate."""
        self._engine.start()

    @register(DP_PROTO)
    def generate(
        self, prompts: list[list[int]], seeds: list[int], *, sampling: SamplingConfig, samples_per_prompt: int
    ) -> list[list[Generation]]:
        """Responses to prompts given as token ids.

        Args:
            prompts: token ids of each prompt.
            seeds: one a prompt; they decide its samples where the engine is deterministic.

        Returns:
            For each prompt, in order, `samples_per_prompt` generations.
        """
        keys = seeds if self._engine.config.deterministic else None
        return self._engine.generate(prompts, sampling, samples_per_prompt, keys)

    @register(ONE_TO_ALL)
    def load_weights(self, directory: Path, version: int) -> None:
        """Load a HuggingFace directory as policy version `version`; the KV cache is dropped."""
        self._engine.load_weights(directory, version)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()
