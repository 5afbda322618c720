"""A stream whose trainer pauses in each step: `python -m tests.integration.paced_loop RECIPE OUTPUT SECONDS`.

It writes the figures of every step.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from hybridflow import PPOConfig, PPOTrainer

STEPS = 6


def main(recipe: str, output: str, seconds: str) -> None:
    steps = []
    with PPOTrainer(PPOConfig(recipe=Path(recipe))) as trainer:
        for _ in range(STEPS):
            rollout = trainer.rollout()
            time.sleep(float(seconds))
            steps.append(trainer.update(rollout))
    Path(output).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
