"""Tuned kernel sizes for experts that are spread over the ranks of an engine.

SGLang has tuned the tiles of its expert kernel for many models and GPUs, in files that are named by the number of
experts that a rank holds and their width. With expert parallelism a rank holds fewer, and where there is no file for so
few it falls back on tiles that are right for none. A rank's experts see as many tokens each as they would if it held
all of them: what was tuned for all of a model's experts fits a part of them too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine3d.input_files import read_model_config
from engine3d.sglang_source import sglang_directory

VARIABLE = "SGLANG_MOE_CONFIG_DIR"
_CONFIGS = "configs"
_TUNED = Path("srt/layers/moe/moe_runner/triton_utils") / _CONFIGS
_NAME = re.compile(r"E=(\d+),(N=.*)")


def environment(directory: Path, server_arguments: Mapping[str, Any]) -> dict[str, str]:
    """Environment by which SGLang's processes find the files of all experts for a share of them.

    Args:
        directory: for links to SGLang's files; taken only where there are experts to spread.
        server_arguments: of the engine: `model_path`, `ep_size`.

    Returns:
        Nothing where every rank holds all experts, or the user names another directory of such files.
    """
    ranks = server_arguments["ep_size"]
    experts = _experts(Path(server_arguments["model_path"])) if ranks > 1 and VARIABLE not in os.environ else 0
    if not experts or experts % ranks:
        return {}
    link(sglang_directory() / _TUNED, directory / _CONFIGS, experts, experts // ranks)
    return {VARIABLE: str(directory)}


def link(tuned: Path, target: Path, experts: int, local: int) -> None:
    """Make `target` hold all that `tuned` does, and what it has for `experts` under the name of `local` experts too.

    A file that is there for so few experts, whatever its version of Triton, stays the one that SGLang finds.
    """
    files = [path for path in tuned.rglob("*.json") if path.parent != tuned]
    there = {path.name for path in files}
    for path in files:
        destination = target / path.relative_to(tuned)
        destination.parent.mkdir(parents=True, exist_ok=True)
        destination.symlink_to(path)
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) == experts and (name := f"E={local},{match[2]}") not in there:
            destination.with_name(name).symlink_to(path)


def tuned_tables(name: str) -> list[Path]:
    """SGLang's files of this name, those for the newest version of Triton first."""
    paths = [path for path in (sglang_directory() / _TUNED).rglob("*.json") if path.name == name]
    return sorted(paths, key=lambda path: [int(number) for number in path.parent.name.split("_")[1:]], reverse=True)


def _experts(model: Path) -> int:
    """Routed experts of a sparse layer; 0 for a dense model."""
    config = read_model_config(model)
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[key]) for key in keys if config.get(key)), 0)
