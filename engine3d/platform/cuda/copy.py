"""Copies of one GPU, to and from all memory that it reaches: its own, its peers', and what other processes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from engine3d.platform.copies import TILE_COLUMNS, Copies, CopyMethod, RunCopies

_BLOCK = 1024
"""Words that a program has in flight."""
_WARPS = 8
_PROGRAMS_PER_SM = 4
_TILE_BYTES = (16 << 10, 128 << 10)
"""The least and the most; between them such that every program gets several tiles."""
_TILES_PER_PROGRAM = 8
_ENGINE_BYTES = 16 << 20
"""Runs from here on are left to the copy engines, which are faster between GPUs (388 against 357 GB/s from each of four
H200 to all others) but take about 10 us for each run, however short."""


@triton.jit(do_not_specialize=["tiles"])
def copy_tiles(table, tiles, COLUMNS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy each tile of a table of `Copies.tiles`, which is [tiles, COLUMNS] int64, in words of WORD bytes."""
    # A word of 16 bytes is two elements of 8, which the compiler joins into one access.
    ELEMENTS: tl.constexpr = 2 if WORD == 16 else 1
    if WORD == 1:
        element = tl.int8
    elif WORD == 2:
        element = tl.int16
    elif WORD == 4:
        element = tl.int32
    else:
        element = tl.int64
    lane = tl.arange(0, BLOCK)
    within = tl.arange(0, ELEMENTS)[None, :]
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry = table + tile * COLUMNS
        source = tl.multiple_of(tl.load(entry).to(tl.pointer_type(element)), WORD)
        target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(element)), WORD)
        source_stride = tl.load(entry + 2)
        target_stride = tl.load(entry + 3)
        width = tl.load(entry + 5).to(tl.int32)
        words = tl.load(entry + 4).to(tl.int32) * width
        for first in range(0, words, BLOCK):
            word = first + lane
            inside = (word < words)[:, None]
            if words == width:
                run = word[:, None] * ELEMENTS + within
                # Past the first-level cache: nothing is read twice.
                value = tl.load(source + run, mask=inside, cache_modifier=".cg")
                tl.store(target + run, value, mask=inside)
            else:
                row = (word // width).to(tl.int64)
                column = word % width
                read = (row * source_stride + column)[:, None] * ELEMENTS + within
                write = (row * target_stride + column)[:, None] * ELEMENTS + within
                value = tl.load(source + read, mask=inside, cache_modifier=".cg")
                tl.store(target + write, value, mask=inside)


def runner(copies: Copies, method: CopyMethod, programs_per_sm: int = _PROGRAMS_PER_SM) -> RunCopies:
    """Return a function that enqueues the copies on the current stream of the current device, that of this call.

    They are captured as one CUDA graph: its concurrency does not depend on the process's number of queues, of which
    Megatron-Core needs one (CUDA_DEVICE_MAX_CONNECTIONS).

    Args:
        copies: between memory that the current device reaches.
        method: of copies that do not cast; torch's kernels cast.
        programs_per_sm: of the kernel.
    """
    copies = copies.simplified().interleaved()
    if not len(copies):
        return lambda: None
    if method == "mixed":
        casts = copies.casts()
        long = (copies.rows == 1) & (copies.length * copies.itemsizes() >= _ENGINE_BYTES)
        by_engine = casts | (long & ~copies.near())
        kernels = _kernels(copies[~by_engine], programs_per_sm)
        copies = copies[by_engine]
    else:
        kernels = []
    graph = _captured(copies, kernels)

    def run(kept: Sequence[RunCopies] = kernels) -> None:  # the graph reads their tables
        graph.replay()

    return run


def _kernels(copies: Copies, programs_per_sm: int) -> list[RunCopies]:
    programs = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count * programs_per_sm
    least, most = _TILE_BYTES
    even = copies.nbytes // (programs * _TILES_PER_PROGRAM)
    tile_bytes = min(most, max(least, even // least * least))
    runs: list[RunCopies] = []
    for word, rows in copies.tiles(tile_bytes).items():
        table = torch.from_numpy(rows).cuda()
        launch(table, 0, word, 1)  # compiles

        def run(table: torch.Tensor = table, word: int = word) -> None:
            launch(table, len(table), word, min(programs, len(table)))

        runs.append(run)
    return runs


def launch(table: torch.Tensor, tiles: int, word: int, programs: int) -> None:
    """Enqueue the copies of the first `tiles` rows of a table."""
    copy_tiles[(programs,)](table, tiles, COLUMNS=TILE_COLUMNS, WORD=word, BLOCK=_BLOCK, num_warps=_WARPS)


def _captured(copies: Copies, kernels: Sequence[RunCopies]) -> torch.cuda.CUDAGraph:
    """Capture kernels next to copies by torch. Copies of different routes run at the same time.

    Runs become nodes of the copy engines. Rows with strides and casts become kernels of torch.
    """
    targets, sources = copies.views()
    routes: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for route, target, source in zip(copies.route.tolist(), targets, sources, strict=True):
        routes.setdefault(route, []).append((target, source))
    torch.cuda.synchronize()  # the tables of the kernels are there
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # Other threads of this process, such as a watchdog of NCCL, may use CUDA meanwhile.
    with torch.no_grad(), torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
        streams = [torch.cuda.Stream() for _ in routes]
        for stream in streams:
            stream.wait_stream(main)
        # In order of their numbers, in which every rank begins with another device: the copy engines take them so.
        for stream, route in zip(streams, sorted(routes), strict=True):
            with torch.cuda.stream(stream):
                for target, source in routes[route]:
                    target.copy_(source, non_blocking=True)
        for run in kernels:
            run()
        for stream in streams:
            main.wait_stream(stream)
    return graph
