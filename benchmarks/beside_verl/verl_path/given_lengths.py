"""Agent loop of verl with responses of a given length."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class GivenLengths(SingleTurnAgentLoop):
    """One response to a prompt's text, which no chat template changes.

    `extra_info.max_new_tokens` of a row is the number of tokens of its responses. verl's configuration of an agent loop
    has no such limit, and its path to SGLang does not pass `rollout.ignore_eos`.
    """

    def __init__(self, *arguments: Any, hf_model_type: str | None = None, **settings: Any) -> None:
        # Without the model's family: Qwen3's needs tokens of Qwen's chat template.
        super().__init__(*arguments, **settings)

    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **row: Any) -> AgentLoopOutput:
        """Generate a response to a row of the data."""
        limits = {"ignore_eos": True, "max_new_tokens": int(row["extra_info"]["max_new_tokens"])}
        return await super().run(sampling_params | limits, priority, **row)

    async def ct_build_initial_tokens(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        """Return the token ids of the only message."""
        return list(self.tokenizer.encode(messages[0]["content"], add_special_tokens=False))
