"""Makes docs/coming_from.md from the names of other systems that error messages know.

python docs/generate_coming_from.py           write the page
python docs/generate_coming_from.py --check   fail if the page is not what the tables say
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hybridflow.config.reading.known_names import (
    ANYWHERE,
    API_ONLY,
    ATTRIBUTES,
    COMMANDS,
    MODULES,
    NEMO_RL,
    OPTIONS,
    PRIME_RL,
    VERL,
)

PAGE = Path(__file__).parent / "coming_from.md"
COMMAND = "python docs/generate_coming_from.py"

_INTRODUCTION = f"""\
# Coming from verl, TRL, NeMo-RL, slime, prime-rl

The program recognizes the names of other systems. For a setting, option, command or import of theirs it prints one
line with the name here, or that there is none. This page lists all of these lines. `{COMMAND}`
generates it from the tables of the messages.

| system | runs a recipe by | here |
|---|---|---|
| verl | `python3 -m verl.trainer.main_ppo key=value ...` | `hybridflow train RECIPE key=value ...` |
| TRL | `GRPOTrainer(model, reward_funcs).train()` | `RLTrainer(model, "grpo", config, reward_fn).train(prompts)` |
| OpenRLHF | `python3 -m openrlhf.cli.train_ppo_ray --pretrain ...` | `hybridflow train RECIPE key=value ...` |
| NeMo-RL | `uv run examples/run_grpo.py --config FILE key=value ...` | `hybridflow train --config FILE key=value ...` |
| slime | `python3 train.py --hf-checkpoint ...` | `hybridflow train RECIPE key=value ...` |
| prime-rl | `uv run rl @ FILE.toml` | `hybridflow train FILE.yaml` |

`hybridflow init DIR --model M --data FILE` writes a first recipe ([Tutorial](tutorial.md)). A recipe has the algorithm
(`algorithm.name=grpo`), the devices of each role (`placement`), the parallel sizes (`train.layout`), and the groups
that [Configuration](configuration.md) lists.
"""

_SECTIONS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("Settings of verl", "Dotted names of verl's command line.", "", VERL),
    ("Settings of NeMo-RL", "Dotted names of its YAML files.", "", NEMO_RL),
    ("Settings of prime-rl", "Dotted names of its TOML files.", "", PRIME_RL),
    (
        "Settings of TRL, OpenRLHF, slime and others",
        "Recognized in any group, and as options: `--rollout-batch-size` is `rollout_batch_size`.",
        "",
        ANYWHERE,
    ),
    (
        "Arguments of the Python API",
        "`PPOConfig`, `RLTrainer` and `PPOTrainer`, in addition to the settings above.",
        "",
        API_ONLY,
    ),
    ("Commands", "", "hybridflow ", COMMANDS),
    ("Options of commands", "In addition to the settings above.", "--", OPTIONS),
    ("Modules", "Modules with this package's name instead of theirs, also with `python -m`.", "hybridflow.", MODULES),
    ("Names to import", "", "from hybridflow import ", ATTRIBUTES),
)


def page() -> str:
    """Generate the page."""
    return "\n".join([_INTRODUCTION, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    for title, meaning, prefix, names in _SECTIONS:
        yield f"## {title}\n"
        if meaning:
            yield f"{meaning}\n"
        yield "| name | |"
        yield "|---|---|"
        for name, text in names.items():
            yield f"| `{prefix}{name}` | {_cell(text)} |"
        yield ""


def _cell(text: str) -> str:
    """A text in a table, where braces and brackets are no markup."""
    escaped = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")
    return escaped[0].upper() + escaped[1:]


def main(arguments: list[str]) -> int:
    """Write the page, or compare it; the exit code."""
    if arguments == ["--check"]:
        if PAGE.read_text() != page():
            print(f"{PAGE} is not what the tables say: {COMMAND}", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
