"""How good the policy is on prompts that it does not learn from."""

from __future__ import annotations

from hybridflow import metrics
from hybridflow.draws import Draw
from hybridflow.metrics import Metrics
from hybridflow.rewards.result import reward_metrics
from hybridflow.roles.reward import reward_result
from hybridflow.step import Machinery, tell_failures


def evaluate(machinery: Machinery, sinks: Metrics, step: int) -> float:
    """Mean reward of responses to the held-out prompts: of the functions, or of the reward model if there are none."""
    machinery.phases.enter("eval")
    recipe, prompts = machinery.recipe, machinery.run.evaluation
    sampling = recipe.rollout.sampling.model_copy(update={"temperature": recipe.trainer.eval_temperature})
    batch = machinery.generator.generate(Draw(prompts, range(len(prompts))), sampling, recipe.trainer.eval_samples)
    failed: dict[str, float] = {}
    if "reward" in machinery.roles.functions:
        result = reward_result(machinery.roles.functions["reward"].score(batch, split="evaluation"))
        tell_failures(f"step {step}, eval", result)
        failed = {name: value for name, value in reward_metrics(result).items() if name.endswith("/failed")}
        accuracy = float(result.total[~result.dropped].mean())
    else:
        accuracy = float(machinery.roles.models["reward_model"].score(batch).facts()["score"].mean())
    sinks.log(step, {metrics.EVAL_ACCURACY: accuracy} | failed, phase="eval")
    return accuracy
