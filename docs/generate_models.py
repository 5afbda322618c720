"""Makes docs/models.md and the data of `check` from the marks of the tests.

python docs/generate_models.py           write both
python docs/generate_models.py --check   fail if one is not what the marks say
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from hybridflow.planning.checks.feature_matrix import DATA, FAMILIES, FEATURES, ITEMS, LAYOUT  # noqa: E402
from tests.support.proves import collected  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
COMMAND = "python docs/generate_models.py"
DENSE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5")
"""Families without experts."""
_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "deepseek_v3": "DeepSeek-V3",
    "glm4_moe": "GLM-4.5",
    "minimax_m2": "MiniMax-M2",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_moe": "Qwen3.5-MoE",
    "qwen3_5": "Qwen3.5",
}
_OF_EXPERTS = ("ep", "etp", "routing_replay")
_OF_ROLES = (
    *product(("fp8", "episodes", "drafts", "mtp"), ("critic", "offload")),
    ("routing_replay", "critic"),
    ("lora", "critic"),
)
"""Pairs of a feature of the actor alone and one of other models: no model has both."""


def _rows(head: str, *rows: tuple[str, ...]) -> str:
    """A table of some rows, with a head of its own."""
    columns = head.split(", ")
    lines = [f"| {' | '.join(row)} |" for row in (columns, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(columns)}", *lines[1:], ""])


_SCALED = "default, linear, llama3, yarn"
_MODELS = _rows(
    "family, models, rotary embeddings, refused",
    ("Llama", "Llama 2, 3, 3.1, 3.2, 3.3", _SCALED, ""),
    ("Mistral", "Mistral-7B v0.2, v0.3", _SCALED, "`sliding_window` below `max_position_embeddings` (v0.1)"),
    ("Qwen2", "Qwen2, Qwen2.5, Qwen2.5-Coder", _SCALED, "`use_sliding_window`, `dual_chunk_attention_config` (1M)"),
    ("Qwen3", "Qwen3", _SCALED, "`use_sliding_window`"),
    ("Qwen2-MoE", "Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", _SCALED, "`use_sliding_window`"),
    ("Qwen3-MoE", "Qwen3-30B-A3B, Qwen3-235B-A22B", _SCALED, "`use_sliding_window`"),
    ("Mixtral", "Mixtral-8x7B, 8x22B", "default", "tied embeddings, `sliding_window`, routes of the engine"),
    ("DeepSeek-V3", "DeepSeek-V3, R1, Kimi-K2 (`model_type: kimi_k2`)", "default, yarn", ""),
    ("GLM-4.5", "GLM-4.5, GLM-4.6 and their Air models", "default, of a part of each head", ""),
    (
        "MiniMax-M2",
        "MiniMax-M2",
        "default, of a part of each head",
        "tied embeddings, `tp` above `num_key_value_heads`",
    ),
    ("gpt-oss", "gpt-oss-20b, gpt-oss-120b", "default, yarn", "`etp`, `rollout.engine.ep`, tied embeddings"),
    (
        "Qwen3-Next",
        "Qwen3-Next-80B-A3B",
        "default, of a part of each head",
        "GPUs, `cp`, `lora`, fp8, `attention_dp`, routes of the engine, `full_attention_interval` other than 4",
    ),
    (
        "Qwen3.5-MoE",
        "Qwen3.5-35B-A3B and larger ones, without pictures",
        "default, of a part of each head",
        "as Qwen3-Next, pictures, critics, `model.create`",
    ),
    ("Qwen3.5", "dense models of Qwen3.5, without pictures", "default, of a part of each head", "as Qwen3.5-MoE"),
)
_SHOWN_OTHERWISE = _rows(
    "family, Transformer Engine compared with `transformers`, balance losses of routers, "
    "auxiliary-loss-free load balancing (expert bias), [runs on GPUs](../benchmarks/README.md)",
    ("Llama", "yes", "no experts", "no experts", "4 layers of 70B"),
    ("Qwen3", "yes", "no experts", "no experts", "none"),
    ("Qwen3-MoE", "yes", "yes", "no such bias", "Qwen3-30B-A3B with all 48 layers"),
    ("DeepSeek-V3", "yes", "yes", "yes", "8 layers of its kind"),
    ("Mistral and Qwen2", "-", "no experts", "no experts", "none"),
    ("GLM-4.5 and MiniMax-M2", "-", "the router of DeepSeek-V3", "yes", "none"),
    ("gpt-oss", "-", "the router of Qwen3-MoE", "no such bias", "none"),
    ("Qwen3-Next and Qwen3.5-MoE", "-", "the router of Qwen3-MoE", "no such bias", "none"),
    ("Qwen3.5", "-", "no experts", "no experts", "none"),
    ("Qwen2-MoE and Mixtral", "-", "the router of Qwen3-MoE", "no such bias", "none"),
)

_INTRODUCTION = f"""\
# Models and features

A cell says **yes** where a test runs the two together and compares the result with a plain run: log-probs, losses,
gradients or weights. `hybridflow check` and the start of a run refuse every other pair, and name it. Pairs of
`episodes` are shown and not refused: episodes leave tokens out of the loss. "Other roles": the actor alone has the one,
only other models the other, and a run may have both.
`{COMMAND}` makes this page and the data of `check` from the marks of the tests. A test compares them.

| item | setting |
|---|---|
| `tp`, `pp`, `vpp`, `ep`, `etp`, `cp` | sizes above 1 in `train.layout` |
| `stages` | layers of each stage, given in `train.layout.stages` |
| `dp` | more than one data-parallel replica |
| `packing`, `padding` | `train.packing=true`, `false` |
| `recomputation` | `train.recompute` |
| `offload` | `ROLE.offload`: a model that leaves its devices between its turns |
| `optimizer_offload` | `train.optimizer.offload` |
| `routing_replay` | `train.routing_replay` |
| `critic` | a model with a scalar head |
| `streams` | `rollout.stream`, with weights that change while requests are in flight |
| `episodes` | `environment`, with [further settings](environments.md#what-goes-with-episodes) |
| `checkpoints` | `checkpoint.save_interval`: what is resumed is what was saved |
| `resharding` | weights in rollout engines, compared with those that SGLang loads of an export |
| `drafts` | `rollout.engine.draft_tokens`: [speculative decoding](speculative_decoding.md) |
| `mtp` | `train.mtp`: the layer that drafts is [trained](speculative_decoding.md#training-the-layer) |
| `fp8` | `rollout.engine.precision=fp8`: the same, of weights that the trainer quantises |
| `fp8_training` | `train.precision=fp8`: GEMMs of quantised operands |
| `fp8_exceptions` | `train.fp8`: layers and shared experts that stay in `dtype` where the model is in fp8 |
| `lora` | `train.lora`: adapters are trained, and the model stays as it is |

{_MODELS}
Gated delta nets (Qwen3-Next, Qwen3.5) are linear attention with a state that passes from token to token. They run in
PyTorch on CPUs, on packed sequences too, where nothing passes from one sequence to the next. SGLang's kernels for them
are replaced on CPUs. Their layers for multi-token prediction (`mtp.*`) are not trained, and exports have them. Those of
DeepSeek-V3 and GLM-4.5 may [draft, and be trained](speculative_decoding.md).

Qwen3.5 is a language model next to a vision tower, in one directory (`Qwen3_5MoeForConditionalGeneration`,
`Qwen3_5ForConditionalGeneration`). The language model is trained and served, on text alone: prompts with pictures are
refused. The vision tower (`model.visual.*`) is not trained, and exports have it as it is. Published files have the
experts of a layer in two tensors. Exports have three tensors for each expert, as `transformers` saves them.

Exports keep their `model_type`. The rotary embeddings dynamic and longrope are refused everywhere: they make the
log-probs of a token depend on the other sequences of its batch. So is `attention_factor` of yarn, which SGLang does
not read.

Tests run on CPUs, in float32 or bfloat16, with small models of the real architectures. Combinations that Megatron-Core
or SGLang exclude are refused with their reason, see [What is not supported](not_supported.md).

{_SHOWN_OTHERWISE}"""
_THREE = "A cell says **yes** where one test runs the family, the layout and the feature together.\n"
_MARK = """
## Adding a pair

A test shows a pair with a mark: `@proves("qwen3_moe", "tp pp packing")` of `tests/support/proves.py`. It names the
family, and for each run of the test the sizes above 1 and the features. The run must be compared with a plain one.
Marks of tests that need a GPU or several hosts do not count.
"""


def data(runs: Iterable[frozenset[str]]) -> str:
    """The file of `check`: sets of items that no other set contains, a line each."""
    distinct = sorted(_largest(runs), key=lambda run: [ITEMS.index(item) for item in _ordered(run)])
    lines = [f"- {' '.join(_ordered(run))}" for run in distinct]
    return "\n".join([f"# Items that tests run together. Made by {COMMAND}.", *lines, ""])


def page(runs: Iterable[frozenset[str]]) -> str:
    """The page."""
    runs = _largest(runs)
    pairs = {frozenset(pair) for run in runs for pair in combinations(run, 2)}

    def cell(one: str, other: str) -> str:
        if one == other or {one, other} == {"packing", "padding"}:
            return ""
        if any(family in (one, other) for family in DENSE) and any(item in (one, other) for item in _OF_EXPERTS):
            return "no experts"
        if (one, other) in _OF_ROLES or (other, one) in _OF_ROLES:
            return "other roles"
        return "yes" if frozenset((one, other)) in pairs else "-"

    sections = [_INTRODUCTION]
    sections.append("\n## Families\n\n" + _table(FAMILIES, (*LAYOUT, *FEATURES), cell))
    sections.append("\n## Layouts\n\n" + _table(LAYOUT, LAYOUT, cell))
    sections.append("\n## Layouts and features\n\n" + _table(LAYOUT, FEATURES, cell))
    sections.append("\n## Features\n\n" + _table(FEATURES, FEATURES, cell))
    sections.append("\n## Three at a time\n\n" + _THREE)
    for family in FAMILIES:
        together = {frozenset(pair) for run in runs if family in run for pair in combinations(run, 2)}
        sections.append(f"\n### {_NAMES[family]}\n\n" + _table(LAYOUT, FEATURES, _of_family(family, together)))
    return "".join([*sections, _MARK])


def _of_family(family: str, together: set[frozenset[str]]) -> Callable[[str, str], str]:
    def cell(size: str, feature: str) -> str:
        if family in DENSE and (size in _OF_EXPERTS or feature in _OF_EXPERTS):
            return "no experts"
        return "yes" if frozenset((size, feature)) in together else "-"

    return cell


def _table(rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], str]) -> str:
    head = f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}\n"
    return head + "".join(
        f"| {_NAMES.get(row, row)} | {' | '.join(cell(row, column) for column in columns)} |\n" for row in rows
    )


def _largest(runs: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    distinct = set(runs)
    return [run for run in distinct if not any(run < other for other in distinct)]


def _ordered(run: frozenset[str]) -> list[str]:
    return [item for item in ITEMS if item in run]


def texts(runs: Iterable[frozenset[str]]) -> Mapping[Path, str]:
    """Both files."""
    return {DATA: data(runs), PAGE: page(runs)}


def main() -> int:
    made = texts(collected(ROOT / "tests"))
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text)
        return 0
    others = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in others:
        print(f"{path.relative_to(ROOT)} is not what the marks of the tests say; renew it: {COMMAND}", file=sys.stderr)
    return 1 if others else 0


if __name__ == "__main__":
    sys.exit(main())
