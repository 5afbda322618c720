"""SGLang's engine arguments: their names, and which of them have a setting of their own here.

SGLang takes ten seconds to import, so its argument names are read from its source instead.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# SGLang's argument -> what to set instead. The rest of SGLang's arguments may be given in `server_args`.
_OWNED = {
    "model_path": "the model directory given to the engine",
    "tp_size": "tp",
    "ep_size": "ep",
    "dp_size": "nothing: an engine is one replica; start several",
    "dtype": "dtype",
    "context_length": "context_length",
    "mem_fraction_static": "mem_fraction_static",
    "max_running_requests": "max_running_requests",
    "max_total_tokens": "max_total_tokens",
    "random_seed": "seed",
    "enable_deterministic_inference": "deterministic",
    "disable_cuda_graph": "cuda_graph",
    "attention_backend": "attention_backend",
    "enable_memory_saver": "memory_saver",
    "skip_tokenizer_init": "nothing: the engine works in token ids",
    "weight_version": "nothing: the version is given with the weights",
}


def sglang_directory() -> Path:
    """Where the installed SGLang lies, found without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("sglang is not installed in this environment")
    return Path(spec.submodule_search_locations[0])


@cache
def server_argument_names() -> frozenset[str]:
    """The fields of SGLang's `ServerArgs`."""
    tree = ast.parse((sglang_directory() / "srt" / "server_args.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    raise ImportError("the installed sglang has no class ServerArgs in srt/server_args.py")


def check_server_arguments(names: Iterable[str]) -> None:
    """Refuse what SGLang does not know and what has a setting of its own. Raises ValueError naming the key."""
    for name in names:
        if name in _OWNED:
            raise ValueError(f"server_args.{name} is not set here; set {_OWNED[name]}")
        if name not in server_argument_names():
            near = difflib.get_close_matches(name, server_argument_names(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"server_args.{name} is not an argument of SGLang's ServerArgs{hint}")
