"""A judge for tests: a tiny model of random weights with a chat template, and a server of it.

Its texts are nonsense; what it is asked for by a schema is of that schema all the same, by SGLang's grammars.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from engine3d.serving import CompletionServer, ServerConfig
from hybridflow.data.tokenizer import make_character_tokenizer
from tests.support.tiny_models import make_qwen3_moe

KEY = "the-key-of-a-test"
ENGINE = {
    **{"dtype": "float32", "context_length": 256, "max_running_requests": 16, "mem_fraction_static": 0.3},
    **{"start_timeout_s": 500},
}
_CHARACTERS = f"{string.printable[:95]}\n"
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def make_judge(directory: Path) -> Path:
    """A model that knows one token a character."""
    make_qwen3_moe(directory, 0)
    tokenizer = make_character_tokenizer(_CHARACTERS, directory)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def judge_server(directory: Path) -> CompletionServer:
    """A server of such a model, to be started."""
    return CompletionServer(
        make_judge(directory / "model"), ServerConfig.model_validate(ENGINE), key=KEY, log_path=directory / "log"
    )


def judge_and_another(directory: Path, functions: str) -> list[list[str]]:
    """Overrides of a recipe whose functions ask a judge, then another one, then the first again.

    Args:
        directory: for both of them.
        functions: the name of the setting with the functions.
    """
    asks = {"name": "j", "path": "judge", "arguments": {"rubric": "{{ response }}", "score_range": [0, 1]}}
    for name in ("one", "other"):
        make_judge(directory / name)
        (directory / name / "vocab.json").write_text(name)
    settings = [f"{functions}={json.dumps([asks])}", "placement.judge=cpu:2"]
    return [[*settings, f"judge.path={directory / name}"] for name in ("one", "other", "one")]
