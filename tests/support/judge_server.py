"""A real SGLang server of an OpenAI-compatible endpoint, on a CPU, with a tiny model of random weights.

    python -m tests.support.judge_server DIRECTORY PORT

Its texts are nonsense; what it is asked for by a schema is of that schema all the same, by SGLang's grammars. Of these
`outlines` alone runs on a CPU.
"""

from __future__ import annotations

import os
import string
import sys
from pathlib import Path

_CHARACTERS = f"{string.printable[:95]}\n"
_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def make_judge(directory: Path) -> None:
    """A model that knows one token a character, with a chat template."""
    from hybridflow.data.tokenizer import make_character_tokenizer
    from tests.support.tiny_models import make_qwen3_moe

    make_qwen3_moe(directory, 0)
    tokenizer = make_character_tokenizer(_CHARACTERS, directory)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(directory)


def main(directory: str, port: str) -> None:
    from engine3d.platform.cpu import sglang as sglang_cpu
    from engine3d.startup.imports import quick_imports

    make_judge(Path(directory))
    os.environ |= sglang_cpu.environment(1) | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    with quick_imports():
        from sglang.srt.entrypoints.http_server import launch_server
        from sglang.srt.server_args import ServerArgs
    arguments = {
        **{"model_path": directory, "host": "127.0.0.1", "port": int(port), "dtype": "float32"},
        **{"context_length": 2048, "max_total_tokens": 8192, "max_running_requests": 16, "mem_fraction_static": 0.3},
        **{"grammar_backend": "outlines", "skip_server_warmup": True},
    }
    launch_server(ServerArgs(**arguments | sglang_cpu.server_arguments()))


if __name__ == "__main__":
    main(*sys.argv[1:])
