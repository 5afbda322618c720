"""A loop of one's own with PPOTrainer: rollouts are looked at, and changed, before they are learned from.

python examples/ppo_trainer_loop.py        three steps of GRPO with the demo's model, on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridflow import PPOTrainer, get_ppo_config

RECIPE = Path(__file__).with_suffix(".yaml")
PROBLEMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
STEPS = 3


def reward(generated_texts: Sequence[str], answers: Sequence[str]) -> list[float]:
    """1 for the right sum, and a little for every digit."""
    pairs = zip(generated_texts, answers, strict=True)
    return [float(text == answer) + 0.1 * sum(map(str.isdigit, text)) for text, answer in pairs]


def main() -> None:
    config = get_ppo_config(
        algorithm="grpo",
        batch_size=8,
        mini_batch_size=8,
        kl_coef=0.0,
        max_steps=STEPS,
        max_new_tokens=4,
        recipe=RECIPE,
    )
    with PPOTrainer(config, reward_fn=reward, prompts=PROBLEMS) as trainer:
        for step in range(STEPS):
            rollouts = trainer.rollout()
            long = rollouts.response_lengths > 3
            rollouts = rollouts.replace(rewards=rollouts.rewards - 0.1 * long)  # advantages are estimated anew
            statistics = trainer.update(rollouts)
            print(f"step {step}: reward {statistics['reward']:.3f}, {int(long.sum())} long responses")


if __name__ == "__main__":
    main()
