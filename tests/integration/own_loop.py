"""Three steps by the Python API: `python -m tests.integration.own_loop RECIPE OUTPUT`.

It writes the columns of each rollout, of which no file of a run has all, and exports the model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from hybridflow import PPOConfig, PPOTrainer

STEPS = 3
OF_THE_RUN = frozenset({"engines", "began", "ended"})
"""Columns that differ from run to run."""


def main(recipe: str, output: str) -> None:
    config = PPOConfig(recipe=Path(recipe))
    rollouts = []
    with PPOTrainer(config) as trainer:
        for _ in range(STEPS):
            rollout = trainer.rollout()
            trainer.update(rollout)
            columns = rollout.columns()
            rollouts.append({name: column.tolist() for name, column in columns.items() if name not in OF_THE_RUN})
        trainer.export(Path(output) / "model")
    (Path(output) / "columns.json").write_text(json.dumps(rollouts))


if __name__ == "__main__":
    main(*sys.argv[1:])
