"""Tables of docs/parallelism.md: worked examples by the functions that `check` uses, and the layouts that are refused.

python docs/generate_parallelism.py            writes them between the page's marks
python docs/generate_parallelism.py --check    fails if the page differs
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine3d.errors import UserError  # noqa: E402
from engine3d.layout import Layout  # noqa: E402
from engine3d.memory import resident_by_rank, update_peak  # noqa: E402
from engine3d.memory.traffic import micro_batch_traffic, update_traffic  # noqa: E402
from engine3d.models import ModelSpec, model_spec  # noqa: E402
from engine3d.training.config import LayoutConfig, TrainConfig  # noqa: E402
from engine3d.training.megatron.settings import check_options  # noqa: E402

PAGE = ROOT / "docs/parallelism.md"
COMMAND = "python docs/generate_parallelism.py"
_BLOCK = re.compile(r"(<!-- table (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_GB = 10**9


@dataclass(frozen=True)
class Example:
    """A model on a number of GPUs in several layouts.

    Args:
        model: folder of its config in `benchmarks/models`.
        gpus: of all data-parallel ranks.
        tokens: of a micro-batch.
        update_tokens: of an update, on all data-parallel ranks.
        layouts: sizes, as `train.layout` has them.
        settings: further ones of `train`.
    """

    model: str
    gpus: int
    tokens: int
    update_tokens: int
    layouts: tuple[Mapping[str, int], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


EXAMPLES = {
    "qwen": Example(
        "qwen3-30b-a3b",
        16,
        16384,
        1 << 22,
        (
            {"ep": 8},
            {"tp": 2, "ep": 8},
            {"tp": 4, "ep": 4},
            {"tp": 2, "ep": 4, "etp": 2},
            {"pp": 2, "ep": 8},
            {"pp": 2, "ep": 8, "vpp": 2},
        ),
    ),
    "deepseek": Example(
        "deepseek-v3",
        256,
        8192,
        1 << 23,
        (
            {"pp": 8, "ep": 32},
            {"pp": 16, "ep": 16},
            {"pp": 16, "ep": 16, "vpp": 2},
            {"pp": 16, "ep": 8},
            {"tp": 2, "pp": 16, "ep": 16},
            {"tp": 4, "pp": 8, "ep": 32},
        ),
        {"recompute": "full"},
    ),
}


def table(example: Example) -> Iterator[str]:
    """Rows of Markdown: for each layout the memory of the fullest rank, and the most that a rank sends."""
    yield (
        "| layout | weights | gradients | optimizer | micro-batch | sum | tp | ep | pp | micro-batches | dp | update "
        "| bubble |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    spec = _spec(example.model)
    for sizes in example.layouts:
        layout = Layout.of_world(example.gpus, **sizes)
        spec.check_layout(layout)
        layouts = LayoutConfig(**sizes)
        config = TrainConfig(layout=layouts, micro_batch_tokens=example.tokens, **example.settings)
        ranks = [layout.coordinates(layout.rank(pp=stage)) for stage in range(layout.pp)]
        resident = [resident_by_rank(spec, layout, at, config) for at in ranks]
        working = [update_peak(spec, layout, at, config, tokens=example.tokens).peak for at in ranks]
        sums = [kept.total + peak for kept, peak in zip(resident, working, strict=True)]
        fullest = sums.index(max(sums))
        kept = resident[fullest]
        sent = [micro_batch_traffic(spec, layout, at, config, tokens=example.tokens) for at in ranks]
        of_update = max(update_traffic(spec, layout, at, config) for at in ranks)
        memory = (kept.weights, kept.gradients, kept.optimizer, working[fullest], sums[fullest])
        traffic = [max(getattr(one, name) for one in sent) for name in ("tp", "ep", "pp")]
        count = example.update_tokens // (example.tokens * layout.dp)
        cells = [f"`{layout}`", *(f"{value / _GB:.1f}" for value in memory), *map(_sent, traffic), str(count)]
        cells += [_sent(of_update), f"{(count * sum(traffic) + of_update) / _GB:,.0f}"]
        cells.append(f"{layout.bubble(count):.0%}".replace("%", " %"))
        yield f"| {' | '.join(cells)} |"


def _sent(number: float) -> str:
    return f"{number / _GB:.3g}" if number else "0"


def refusals() -> Iterator[str]:
    """Rows of Markdown: what is refused, and the message."""
    qwen, dense = _spec("qwen3-30b-a3b"), _spec("llama-3-70b")
    gathers = {"moe_token_dispatcher_type": "allgather"}
    cases: dict[str, Callable[[], Any]] = {
        "sizes that do not divide the devices": lambda: Layout.of_world(8, tp=3),
        "`ep` and `etp` that do not divide a stage": lambda: Layout.of_world(8, pp=4, ep=4),
        "`tp` that does not divide the heads": lambda: qwen.check_layout(Layout(tp=64)),
        "more stages than layers": lambda: qwen.check_layout(Layout(pp=64)),
        "virtual stages without a pipeline": lambda: Layout(vpp=2),
        "`stages` of another number": lambda: Layout(pp=2, stages=(16, 16, 16)),
        "a stage without layers": lambda: Layout(pp=2, stages=(48, 0)),
        "`stages` that do not add up": lambda: qwen.check_layout(Layout(pp=2, stages=(24, 25))),
        "`ep` that does not divide the experts": lambda: qwen.check_layout(Layout(ep=3, dp=3)),
        "`etp` that does not divide an expert": lambda: qwen.check_layout(Layout(etp=5, dp=5)),
        "`ep` or `etp` of a dense model": lambda: dense.check_layout(Layout(ep=2, dp=2)),
        "`tp` without sequence parallelism, where a model has experts": lambda: TrainConfig(
            sequence_parallel=False
        ).check_trained(qwen.sizes, Layout(tp=2)),
        "gathered tokens in a pipeline": lambda: _check(qwen, Layout(pp=2, ep=2, dp=2), megatron=gathers),
        "gathered tokens without packing": lambda: _check(qwen, Layout(ep=2, dp=2), megatron=gathers, packing=False),
        "`cp` without packing": lambda: _check(qwen, Layout(cp=2), packing=False),
    }
    yield "| refused | message |"
    yield "|---|---|"
    for what, case in cases.items():
        yield f"| {what} | `{_message(case)}` |"


def _check(spec: ModelSpec, layout: Layout, **settings: Any) -> None:
    check_options(TrainConfig(**settings), spec, layout, transformer_engine=True)


def _message(case: Callable[[], Any]) -> str:
    """Return the refusal of a case.

    Raises:
        AssertionError: it is accepted.
    """
    try:
        case()
    except UserError as error:
        return str(error)
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    raise AssertionError("a layout that the page calls refused is accepted")


def _spec(model: str) -> ModelSpec:
    return model_spec(json.loads((ROOT / "benchmarks/models" / model / "config.json").read_text()))


def page(text: str) -> str:
    """Return the page with its tables computed again."""

    def block(match: re.Match[str]) -> str:
        name = match[2]
        rows = refusals() if name == "refused" else table(EXAMPLES[name])
        return f"{match[1]}\n" + "".join(f"{row}\n" for row in rows) + "\n"

    return _BLOCK.sub(block, text)


def main() -> int:
    text = PAGE.read_text()
    renewed = page(text)
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(renewed)
        return 0
    if renewed != text:
        print(f"{PAGE.relative_to(ROOT)} is not what the functions compute; renew it: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
