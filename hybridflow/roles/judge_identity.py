"""Identity of a judge whose verdicts are cached."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from engine3d.models.files.safetensors_files import TensorFiles
from hybridflow.rewards.config import RewardFunctionConfig
from hybridflow.roles.config import JudgeModel

_OF_TOKENIZERS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.tiktoken"),
    *("tiktoken.model", "spiece.model", "chat_template*", "chat_template*/*"),
)
_OF_NO_VERDICT = {
    *("start_timeout_s", "shutdown_timeout_s", "mem_fraction_static", "max_running_requests", "max_total_tokens"),
}
"""Settings of the engine by which no answer is another."""


def asked_judge_identity(functions: Iterable[RewardFunctionConfig], judge: JudgeModel | None) -> list[str]:
    """The identity of a recipe's judge where one of these functions asks it; nothing where none does."""
    if judge is None or not any(function.asks_recipes_judge for function in functions):
        return []
    return [judge_identity(judge)]


def judge_identity(judge: JudgeModel) -> str:
    """Return the identity of a judge: a digest of its weights, its configuration and how it is served."""
    digest = hashlib.sha256(TensorFiles(judge.path).fingerprint().encode())
    patterns = ("config.json", "generation_config.json", *_OF_TOKENIZERS)
    files = {path for pattern in patterns for path in judge.path.glob(pattern) if path.is_file()}
    template = judge.engine.server_args.get("chat_template")
    if isinstance(template, str) and Path(template).is_file():
        files.add(Path(template))
    for path in sorted(files):
        digest.update(f"{path.name} {path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    digest.update(judge.engine.model_dump_json(exclude=_OF_NO_VERDICT).encode())
    return digest.hexdigest()
