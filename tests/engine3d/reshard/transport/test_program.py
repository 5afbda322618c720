"""Programs of copies against the plainest loop; the GPU's kernel in Triton's interpreter, and compiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine3d.platform import platform
from engine3d.platform.copies import WORDS, Copies
from engine3d.reshard.plan.transfers import Segments
from engine3d.reshard.transport.program import CopyProgram, Route, _joined, flat
from tests.support.interpreted import run_interpreted
from tests.support.random_segments import copied, empty_targets, nbytes, random_segments, random_sources
from tests.support.work import calls_of


def _flat_on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    device = "cuda" if platform.gpus else "cpu"
    return [tensor.to(device) for tensor in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mixed", "engines"])
@pytest.mark.parametrize("seed", range(8))
def test_a_program_copies_what_the_loop_copies(seed: int, method: str) -> None:
    routes, expected, programs = [], [], []
    for number in range(3):
        segments = random_segments(10 * seed + number)
        sources, targets = random_sources(10 * seed + number), empty_targets()
        on_device = (_flat_on_device(sources), _flat_on_device(targets))
        routes.append(Route(segments, *on_device))
        copied(segments, sources, targets)
        expected.append(targets)
        programs.append(on_device[1])
    program = CopyProgram(routes, method=method)  # type: ignore[arg-type]
    assert program.nbytes == sum(nbytes(route.segments) for route in routes)
    for _ in range(2):
        program.run()
        platform.synchronize()
        for made, right in zip(programs, expected, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(made, right, strict=True))
            for tensor in made:
                tensor.zero_()
            platform.synchronize()


def test_a_program_without_pieces_runs() -> None:
    program = CopyProgram([])
    program.run()
    assert program.nbytes == 0


def test_pieces_that_reach_out_of_their_buffers_are_refused() -> None:
    one = np.array([1], dtype=np.int64)
    segments = Segments(one * 0, one * 90, one * 20, one * 0, one * 0, one * 20, one, one * 20)
    with pytest.raises(ValueError, match="reaches out"):
        CopyProgram([Route(segments, [torch.zeros(100)], [torch.zeros(100)])])


def test_a_flat_tensor_is_part_of_its_storage() -> None:
    memory = torch.arange(20, dtype=torch.float32)
    block = flat(memory.untyped_storage(), torch.float32, 16, 6)
    assert block.tolist() == [4, 5, 6, 7, 8, 9]
    block[0] = -1
    assert memory[4] == -1


def _copies(seed: int) -> Copies:
    routes = [Route(random_segments(seed + n), random_sources(seed + n), empty_targets()) for n in range(3)]
    copies = _joined(routes).simplified()
    return copies[~copies.casts()]


@pytest.mark.parametrize("tile_bytes", [64, 256, 1 << 20])
def test_tiles_cover_each_byte_once(tile_bytes: int) -> None:
    copies = _copies(seed=5)
    tables = copies.tiles(tile_bytes)
    assert set(tables) <= set(WORDS)
    moves: dict[int, int] = {}
    for word, table in tables.items():
        for source, target, source_stride, target_stride, rows, width in table.tolist():
            assert rows * width * word <= tile_bytes
            assert all(value % word == 0 for value in (source, target))
            for row in range(rows):
                for byte in range(width * word):
                    to = target + row * target_stride * word + byte
                    assert to not in moves
                    moves[to] = source + row * source_stride * word + byte
    expected: dict[int, int] = {}
    for n in range(len(copies)):
        source_tensor, target_tensor = copies.sources[copies.source[n]], copies.targets[copies.target[n]]
        size = source_tensor.dtype.itemsize
        for row in range(int(copies.rows[n])):
            source = source_tensor.data_ptr() + int(copies.source_offset[n] + row * copies.source_stride[n]) * size
            target = target_tensor.data_ptr() + int(copies.target_offset[n] + row * copies.target_stride[n]) * size
            expected |= {target + byte: source + byte for byte in range(int(copies.length[n]) * size)}
    assert moves == expected


def test_routes_of_different_size_advance_together() -> None:
    count = 1000
    column = np.zeros(count, dtype=np.int64)
    copies = Copies(
        [torch.zeros(100)],
        [torch.zeros(100)],
        route=np.repeat(np.arange(3), [100, 300, 600]),
        source=column,
        source_offset=column,
        source_stride=column + 1,
        target=column,
        target_offset=column,
        target_stride=column + 1,
        rows=column + 1,
        length=column + 1,
    )
    order = copies.interleaved().route
    for block in np.split(order, 10):
        assert np.abs(np.bincount(block, minlength=3) - [10, 30, 60]).max() <= 2


def test_tables_of_many_pieces_are_made_without_a_loop_over_them() -> None:
    count = 50_000
    numbers = np.arange(count, dtype=np.int64)
    copies = Copies(
        [torch.zeros(1, dtype=torch.bfloat16).expand(count * 128)],
        [torch.zeros(1, dtype=torch.bfloat16).expand(count * 128)],
        route=numbers % 4,
        source=numbers * 0,
        source_offset=numbers * 128,
        source_stride=numbers * 0 + 128,
        target=numbers * 0,
        target_offset=numbers[::-1] * 128,
        target_stride=numbers * 0 + 128,
        rows=numbers * 0 + 1,
        length=numbers * 0 + 128,
    )
    (table,) = copies.simplified().interleaved().tiles(1 << 17).values()
    assert len(table) == count
    assert calls_of(lambda: copies.simplified().interleaved().tiles(1 << 17)) < 1000


def _interpreted(_device: str) -> None:
    from engine3d.platform.cuda import copy as cuda_copy

    for seed, tile_bytes in ((0, 64), (1, 512)):
        copies = _copies(seed)
        for word, table in copies.tiles(tile_bytes).items():
            cuda_copy.launch(torch.from_numpy(table), len(table), word, programs=3)
        for number in range(3):
            sources, expected = random_sources(seed + number), empty_targets()
            made = copies.targets[number * len(expected) : (number + 1) * len(expected)]
            segments = random_segments(seed + number)
            same = np.array([sources[s].dtype == expected[t].dtype for s, t in _buffers(segments)])
            copied(_selected(segments, same), sources, expected)
            assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def _buffers(segments: Segments) -> list[tuple[int, int]]:
    return list(zip(segments.source_buffer.tolist(), segments.target_buffer.tolist(), strict=True))


def _selected(segments: Segments, which: np.ndarray) -> Segments:
    return Segments(*(getattr(segments, name)[which] for name in Segments.__dataclass_fields__))


@pytest.mark.processes
@pytest.mark.skipif(platform.gpus > 0, reason="the tests above run the kernel on the GPU")
def test_the_kernel_interpreted_copies_what_the_loop_copies() -> None:
    run_interpreted(_interpreted)


@pytest.mark.slow
def test_accesses_of_the_compiled_kernel_are_as_wide_as_the_words() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from engine3d.platform.copies import TILE_COLUMNS
    from engine3d.platform.cuda import copy as cuda_copy

    accesses = {16: "v2.b64", 8: "b64", 4: "b32", 2: "b16", 1: "b8"}
    for word in WORDS:
        source = ASTSource(
            fn=cuda_copy.copy_tiles,
            signature={
                "table": "*i64",
                "tiles": "i32",
                "COLUMNS": "constexpr",
                "WORD": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={(2,): TILE_COLUMNS, (3,): word, (4,): cuda_copy._BLOCK},
            attrs={(0,): [["tt.divisibility", 16]]},
        )
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": cuda_copy._WARPS}).asm["ptx"]
        assert f"ld.global.cg.{accesses[word]}" in ptx
        assert f"st.global.{accesses[word]}" in ptx
