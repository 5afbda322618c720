"""Processes of verl with the changes of `benchmarks/beside_verl/verl_path`: one response of its agent loop, as JSON.

The argument is the directory of a tokenizer. A stand-in for the server answers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


class AnsweringServer:
    """Answers with as many tokens as requested."""

    async def generate(self, *, sampling_params: dict[str, Any], **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.sampling = sampling_params
        count = sampling_params["max_new_tokens"]
        return TokenOutput(token_ids=[2] * count, log_probs=[-1.0] * count)


async def main(directory: str) -> dict[str, Any]:
    """Return the lengths and sampling settings of a response, and the effect of the other changes."""
    import hydra.utils
    import torch
    from flash_attn.bert_padding import unpad_input
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils.dataset.rl_dataset import RLHFDataset

    server = AnsweringServer()
    sizes = {"prompt_length": 64, "response_length": 32}
    configuration = Path(__file__).parents[2] / "benchmarks/beside_verl/verl_path/agent_loops.yaml"
    loop = hydra.utils.instantiate(
        OmegaConf.load(configuration)[0],
        trainer_config=DictConfigWrap(OmegaConf.create({"actor_rollout_ref": {"rollout": sizes}})),
        server_manager=server,
        tokenizer=AutoTokenizer.from_pretrained(directory),
        processor=None,
        hf_model_type="qwen3_moe",
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(OmegaConf.create({})),
        tools=ToolListWrap([]),
    )
    output = await loop.run(
        {"temperature": 1.0},
        raw_prompt=[{"role": "user", "content": "abc 1+2="}],
        extra_info={"index": 0, "max_new_tokens": 7},
    )
    differences = rollout_corr_helper.compute_offpolicy_metrics(
        old_log_prob=torch.tensor([[-1.0, -2.0]]),
        rollout_log_prob=torch.tensor([[-1.5, -9.0]]),
        response_mask=torch.tensor([[1, 0]]),
    )
    clip: dict[str, Any] = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "global_batch_info": {}}
    _, losses = core_algos.get_policy_loss_fn("vanilla")(
        old_log_prob=torch.tensor([[-1.5, -9.0]]),
        log_prob=torch.tensor([[-1.0, -2.0]], requires_grad=True),
        advantages=torch.ones(1, 2),
        response_mask=torch.tensor([[1, 0]]),
        config=OmegaConf.create(clip),
    )
    assert sum(output.response_mask) == len(output.response_logprobs)
    return {
        "prompt": len(output.prompt_ids),
        "response": len(output.response_ids),
        "sampling": server.sampling,
        "bert_padding": unpad_input.__module__,
        "mismatch": differences["logprob_abs_diff"],
        "mismatch in bypass mode": losses["rollout_corr/logprob_abs_diff"],
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
