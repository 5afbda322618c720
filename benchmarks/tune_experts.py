"""Tiles of SGLang's expert kernel for the experts of a rank, tuned where there are few tokens for each, as in decoding.

    python benchmarks/tune_experts.py --model qwen3-30b-a3b --ranks 4 --out $PWD/tuned > tuned.json
    SGLANG_MOE_CONFIG_DIR=$PWD/tuned hybridflow run RECIPE

Needs GPUs; it uses all that it sees. SGLang reads tiles from files by the experts of a rank and their width, one for
the first product (gate and up) and one for the last (down), and takes those of the number of tokens that is nearest.
Its own tuner gives a rank as many choices as all ranks have together: with four ranks four times as many tokens for
each expert. Here every token chooses among all experts, and most choices are other ranks', as in an engine.

Every combination of tiles is timed for both products by a CUDA graph; both have the same `BLOCK_SIZE_M`, because they
share an order of tokens. What is written is the table that an engine would have found, with the best of these for each
of `--tokens`. With `--precision fp8` the products have operands in fp8, and a product includes the quantisation of its
input.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.reshard_plan import Parser, named_model, versions
from engine3d.errors import UserError
from engine3d.models.precision import BLOCK, Precision, scale_shape
from engine3d.platform import platform
from engine3d.rollout.moe_configs import tuned_tables
from engine3d.settings import Settings

Tiles = dict[str, int]
Times = dict[str, dict[int, float]]
"""Milliseconds of `first` and `last`, by tokens."""

_WORKERS_PER_GPU = 8
"""Compile at the same time. Only when all is compiled they measure, one at a time."""
_TIMED_MS = 2
"""Milliseconds of each of ten measurements, whose mean is taken."""
_SHARED_MEMORY = 227 << 10
_PRODUCTS = ("first", "last")


class Shapes(Settings):
    """Shapes of a rank's matrix products.

    Args:
        experts: of the model.
        local: of them, this rank's, which are the first ones.
        hidden, width: of a token, and of an expert between its two products.
        chosen: experts of a token.
        precision: of the operands; None for bf16.
    """

    experts: int
    local: int
    hidden: int
    width: int
    chosen: int
    precision: Precision | None = None


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="tune_experts.py", description="Tiles of SGLang's expert kernel for a rank's experts.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--ranks", type=int, default=1, help="over which experts are spread")
    parser.add_argument("--tokens", default="256,512,1024,1536,2048", help="of all ranks together, with commas")
    parser.add_argument("--precision", choices=("fp8",), help="rollout.engine.precision; bf16 if not given")
    parser.add_argument("--out", type=Path, required=True, help="directory of tables, for SGLANG_MOE_CONFIG_DIR")
    try:
        options = parser.parse_args(arguments)
        shapes = shapes_of(options.model, options.ranks, options.precision)
        tokens = [int(count) for count in options.tokens.split(",") if count.isdecimal() and int(count)]
        if len(tokens) != options.tokens.count(",") + 1:
            raise UserError(f"--tokens {options.tokens}: expected whole numbers of at least 1, such as 256,1024")
        if not platform.gpus:
            raise UserError("this machine has no GPU, whose kernel is tuned")
        now = tiles_now(shapes)
        times = measured(shapes, tokens, now)
        table = {count: best(times, count) for count in tokens}
        write(options.out, shapes, table, now)
    except UserError as error:
        print(f"tune_experts.py: {error}", file=sys.stderr)
        return 2
    stats: dict[int, dict[str, Any]] = {}
    for count in tokens:
        before = nearest(now, count)
        stats[count] = {"before_ms": both(times, before, before, count), "ms": both(times, *table[count], count)}
        stats[count] |= dict(zip(_PRODUCTS, table[count], strict=True))
    command = " ".join(["benchmarks/tune_experts.py", *sys.argv[1:]])
    conditions = {"command": command, "device": torch.cuda.get_device_name(), "shapes": shapes.model_dump()}
    print(json.dumps(conditions | {"tokens": stats, "versions": versions()}, indent=2))
    return 0


def shapes_of(model: str, ranks: int, precision: Precision | None = None) -> Shapes:
    """Return the shapes of a model's experts over `ranks` ranks.

    Raises:
        UserError: it has none, or they cannot be spread evenly.
    """
    sizes = named_model(model).sizes
    if ranks < 1 or not sizes.experts or sizes.experts % ranks:
        raise UserError(f"--ranks {ranks}: {model} has {sizes.experts} experts, which cannot be spread evenly")
    return Shapes(
        experts=sizes.experts,
        local=sizes.experts // ranks,
        hidden=sizes.hidden,
        width=sizes.expert_ffn,
        chosen=sizes.experts_per_token,
        precision=precision,
    )


def choices(precision: Precision | None = None) -> list[Tiles]:
    """All tiles that are tried: those whose stages fit a processor's shared memory, in fp8 of a block's columns."""
    candidates = []
    itemsize, columns = (2, (64, 128)) if precision is None else (1, (BLOCK,))
    for m, n, k, warps, stages in itertools.product((16, 32, 64, 128), (64, 128, 256), columns, (4, 8), (3, 4, 5)):
        if stages * (m + n) * k * itemsize <= _SHARED_MEMORY and m * n <= 128 * 128 * (warps // 4):
            sizes = {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 1}
            candidates.append(sizes | {"num_warps": warps, "num_stages": stages})
    return candidates


def measured(shapes: Shapes, tokens: Sequence[int], now: Mapping[int, Tiles]) -> list[tuple[Tiles, Times]]:
    """Each of `choices` and of the tiles that an engine would find, with its times; without those that do not run."""
    tried = choices(shapes.precision)
    tried += [tiles for tiles in now.values() if tiles not in tried]
    context = multiprocessing.get_context("spawn")
    locks = [context.Lock() for _ in range(platform.gpus)]
    numbers = context.Value("i", 0)
    with ProcessPoolExecutor(
        _WORKERS_PER_GPU * platform.gpus, context, initializer=_start, initargs=(shapes, list(tokens), locks, numbers)
    ) as pool:
        running = [tiles for tiles, runs in zip(tried, pool.map(_runs, tried), strict=True) if runs]
        print(f"{len(running)} of {len(tried)} combinations of tiles run", file=sys.stderr, flush=True)
        return list(zip(running, pool.map(_times, running), strict=True))


def both(times_by_tiles: Sequence[tuple[Tiles, Times]], first: Tiles, last: Tiles, tokens: int) -> float:
    """Milliseconds of both products with these tiles."""

    def of(tiles: Tiles, product: str) -> float:
        return next(times[product][tokens] for candidate, times in times_by_tiles if candidate == tiles)

    return of(first, "first") + of(last, "last")


def best(times_by_tiles: Sequence[tuple[Tiles, Times]], tokens: int) -> tuple[Tiles, Tiles]:
    """The fastest tiles of the first and the last product that have one `BLOCK_SIZE_M`."""
    rows = {tiles["BLOCK_SIZE_M"] for tiles, _ in times_by_tiles}
    pairs = []
    for size in rows:
        alike = [(tiles, times) for tiles, times in times_by_tiles if tiles["BLOCK_SIZE_M"] == size]
        fastest = [min(alike, key=lambda candidate: candidate[1][product][tokens]) for product in _PRODUCTS]
        took = sum(times[product][tokens] for (_, times), product in zip(fastest, _PRODUCTS, strict=True))
        pairs.append((took, fastest[0][0], fastest[1][0]))
    _, first, last = min(pairs, key=lambda pair: pair[0])
    return first, last


def write(out: Path, shapes: Shapes, table: Mapping[int, tuple[Tiles, Tiles]], now: Mapping[int, Tiles]) -> None:
    """Write both tables of a rank's experts: the tiles of the first and of the last product.

    Args:
        table: by numbers of tokens, those of both products.
        now: those of both for other numbers of tokens.
    """
    import triton

    directory = out / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    directory.mkdir(parents=True, exist_ok=True)
    for index, down in enumerate((False, True)):
        complete = {count: table[count][index] if count in table else now[count] for count in sorted({*now, *table})}
        (directory / _table_name(shapes.local, shapes, down=down)).write_text(json.dumps(complete, indent=4) + "\n")


def tiles_now(shapes: Shapes) -> dict[int, Tiles]:
    """The table of tiles that an engine finds for such experts on this machine's GPUs.

    Raises:
        UserError: there is none.
    """
    names = [_table_name(experts, shapes) for experts in (shapes.local, shapes.experts)]
    tables = [path for name in names for path in tuned_tables(name)]
    if not tables:
        raise UserError(f"SGLang has no table {' or '.join(names)}")
    return {int(count): tiles for count, tiles in json.loads(tables[0].read_text()).items()}


def nearest(now: Mapping[int, Tiles], tokens: int) -> Tiles:
    """The tiles that SGLang takes of a table."""
    return now[min(now, key=lambda count: abs(count - tokens))]


def _table_name(experts: int, shapes: Shapes, *, down: bool = False) -> str:
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config import get_config_file_name

    quantised = (None, None) if shapes.precision is None else ("fp8_w8a8", [BLOCK, BLOCK])
    name: str = get_config_file_name(experts, shapes.width, *quantised, down_moe=down)
    return name


_worker: dict[str, Any] = {}


def _start(shapes: Shapes, tokens: Sequence[int], locks: Sequence[Any], numbers: Any) -> None:
    """Be a worker on one of the GPUs."""
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    with numbers.get_lock():
        number = numbers.value
        numbers.value += 1
    torch.cuda.set_device(number % len(locks))
    get_context().set_server_args(ServerArgs(model_path="dummy", device="cuda"))
    _worker.update(shapes=shapes, tokens=tokens, lock=locks[number % len(locks)])


def _runs(tiles: Tiles) -> bool:
    """True if the tiles run on this GPU. Their kernels are compiled then."""
    from triton.runtime.errors import OutOfResources

    try:
        for tokens in _worker["tokens"]:
            for run in _products(_worker["shapes"], tokens, tiles):
                run()
    except OutOfResources:
        return False
    return True


def _times(tiles: Tiles) -> Times:
    """Measure both products for each number of tokens, while no other worker uses this GPU."""
    from triton.testing import do_bench_cudagraph

    times: Times = {product: {} for product in _PRODUCTS}
    with _worker["lock"]:
        for tokens in _worker["tokens"]:
            for product, run in zip(_PRODUCTS, _products(_worker["shapes"], tokens, tiles), strict=True):
                times[product][tokens] = do_bench_cudagraph(run, rep=_TIMED_MS)
    return times


def _products(shapes: Shapes, tokens: int, tiles: Mapping[str, int]) -> tuple[Any, Any]:
    """Functions that make the first and the last product as `fused_experts` does in an engine."""
    import triton.language as tl
    from sglang.kernels.ops.moe.fused_moe_triton_kernels import invoke_fused_moe_kernel
    from sglang.srt.layers.moe.moe_runner.triton_utils.moe_align_block_size import moe_align_block_size

    generator = torch.Generator("cuda").manual_seed(tokens)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    chosen = torch.rand(tokens, shapes.experts, generator=generator, device="cuda").topk(shapes.chosen, dim=1)
    weights = chosen.values.softmax(dim=-1)
    ids = torch.where(chosen.indices < shapes.local, chosen.indices, -1).int()
    order = moe_align_block_size(ids, tiles["BLOCK_SIZE_M"], shapes.local)
    rows = tokens * shapes.chosen
    given, between, made = drawn(tokens, shapes.hidden), drawn(rows, shapes.width), drawn(rows, 2 * shapes.width)
    first, last = drawn(shapes.local, 2 * shapes.width, shapes.hidden), drawn(shapes.local, shapes.hidden, shapes.width)
    result = drawn(tokens, shapes.chosen, shapes.hidden)
    kinds = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
    common: dict[str, Any] = dict.fromkeys(kinds, False) | {"compute_type": tl.bfloat16, "filter_expert": True}
    scales: list[torch.Tensor | None] = [None, None]
    if shapes.precision is not None:
        common |= {"use_fp8_w8a8": True, "block_shape": [BLOCK, BLOCK]}
        scales = [
            torch.full((shapes.local, *scale_shape(matrix.shape[1:])), 2.0**-8, device="cuda")
            for matrix in (first, last)
        ]
        first, last = (matrix.to(torch.float8_e4m3fn) for matrix in (first, last))

    def run_first() -> None:
        scale = (None, scales[0], None)
        operands = (given, first, None, made, *scale, weights, ids, *order, False, shapes.chosen, dict(tiles))
        invoke_fused_moe_kernel(*operands, **common)

    def run_last() -> None:
        scale = (None, scales[1], None)
        operands = (between, last, None, result, *scale, weights, ids, *order, True, 1, dict(tiles))
        invoke_fused_moe_kernel(*operands, **common, router_topk=shapes.chosen)

    return run_first, run_last


if __name__ == "__main__":
    sys.exit(main())
