"""Saving and loading a model's state on real layouts: what is loaded is what was saved, bit for bit."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine3d.checkpoint.digests.chunks import flat_chunks
from engine3d.checkpoint.manifest import checksum
from engine3d.checkpoint.state import join_remainder, split_remainder
from engine3d.errors import DamagedCheckpointError, EngineError, UserError
from engine3d.layout import Layout
from engine3d.models.rules import LocalParameter, TensorSlice
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.proves import proves, runs_of

SETTINGS = OptimizerConfig(lr=1e-2, min_lr=1e-3, schedule="cosine", warmup_steps=2, decay_steps=9, weight_decay=0.1)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 2, "stages": (3, 1)},
    {"cp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "ep": 2},
    {"tp": 2, "ep": 4, "etp": 1},
    {"ep": 4},
]


def build_engine(directory: Path, sizes: dict[str, Any], *, load: bool = True, **settings: Any) -> Any:
    from engine3d.training.engine import TrainEngine

    value_head = settings.pop("value_head", False)
    arguments = {"dtype": "float32", "micro_batch_tokens": 48, "optimizer": SETTINGS} | settings
    config = TrainConfig(layout=LayoutConfig(**sizes), **arguments)
    layout = Layout.of_world(int(os.environ["WORLD_SIZE"]), **sizes)
    return TrainEngine(directory, config, layout, seed=1, load=load, value_head=value_head)


def update(engine: Any, number: int) -> tuple[float, float]:
    """The engine's `number`-th update: its gradient norm and learning rate."""
    generator = torch.Generator().manual_seed(number)
    samples = [torch.randint(0, 60, (length,), generator=generator).tolist() for length in (5, 9, 13, 7)]
    mine = samples[engine.coordinates.dp :: engine.layout.dp]
    sequences = Sequences.of(mine, weights=torch.full((sum(map(len, mine)),), 1 / 34))

    def loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        values = outputs.values if engine.value_head else outputs.logprobs
        return -(values * columns["weights"]).sum(), None

    result = engine.update(sequences, loss)
    return result.grad_norm, result.learning_rate


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded checkpoint, whole."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    stored = FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.load(dict(tensors), storage_reader=FileSystemReader(directory), no_dist=True)
    return tensors


def assert_same(actual: Path, expected: Path) -> None:
    left, right = read_all(actual), read_all(expected)
    assert left.keys() == right.keys()
    for key, tensor in right.items():
        assert left[key].dtype == tensor.dtype
        assert torch.equal(left[key], tensor), key


def save(engine: Any, checkpoint: Any, directory: Path, *, background: bool = True) -> tuple[list[Any], Any]:
    """Save. The files, and the update that is made while they are written in the background."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    begun = checkpoint.begin(directory, background=background)
    # What is saved is the state at `begin`, whatever training does afterwards.
    meanwhile = update(engine, 99) if background else None
    entries = checkpoint.finish()
    assert begun.nbytes <= sum(entry.size for entry in entries)
    files = [(entry, (directory / entry.path).stat().st_size, checksum(directory / entry.path)) for entry in entries]
    return files, meanwhile


def _first(directory: Path, root: Path, sizes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Two updates, a save in the background during a third, another update, a save that blocks and an update."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    engine = build_engine(directory, sizes, **settings)
    checkpoint = EngineCheckpoint(engine)
    for number in (0, 1):
        update(engine, number)
    entries, meanwhile = save(engine, checkpoint, root / "background")
    updates = [meanwhile, update(engine, 11)]
    entries += save(engine, checkpoint, root / "blocking", background=False)[0]
    updates.append(update(engine, 20))
    checkpoint.begin(_made(root / "end"), background=True)
    checkpoint.finish()
    engine.close()
    return {"entries": entries, "updates": updates}


def _made(directory: Path) -> Path:
    if dist.get_rank() == 0:
        directory.mkdir(parents=True)
    dist.barrier()
    return directory


def _load_in_many_batches() -> None:
    """Read two batches at a time, as for a large model."""
    from engine3d.checkpoint.reading import load

    load._BATCH_BYTES = 8 << 10


def _again(directory: Path, root: Path, sizes: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Repeat the updates that `_first` made after its first save, from that save."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    _load_in_many_batches()
    engine = build_engine(directory, sizes, load=False, **settings)
    checkpoint = EngineCheckpoint(engine)
    reported: dict[str, Any] = {"loaded": checkpoint.load(root / "background"), "updates": []}
    checkpoint.begin(_made(root / "loaded"), background=True)
    checkpoint.finish()
    reported["updates"] += [update(engine, number) for number in (99, 11, 20)]
    checkpoint.begin(_made(root / "end-again"), background=True)
    checkpoint.finish()
    checkpoint.load(root / "background")  # over a state that is there
    checkpoint.begin(_made(root / "loaded-again"), background=True)
    checkpoint.finish()
    engine.close()
    return reported


def _elsewhere(directory: Path, root: Path, layouts: list[dict[str, int]], settings: dict[str, Any]) -> list[Any]:
    """Load on other layouts, save again at once, and make the next update."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    _load_in_many_batches()
    reported = []
    for number, sizes in enumerate(layouts):
        engine = build_engine(directory, sizes, load=False, **settings)
        checkpoint = EngineCheckpoint(engine)
        loaded = checkpoint.load(root / "background")
        checkpoint.begin(_made(root / f"elsewhere-{dist.get_world_size()}-{number}"), background=True)
        checkpoint.finish()
        reported.append((loaded, update(engine, 99)))
        engine.close()
    return reported


CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {"tp": 2, "ep": 2}, 4, {}),
    "bfloat16": (
        "qwen3_moe",
        {"pp": 2, "vpp": 2, "ep": 2},
        4,
        {"dtype": "bfloat16", "optimizer": SETTINGS.model_copy(update={"offload": True})},
    ),
    "tied": ("qwen3-tied", {"tp": 2, "pp": 2, "vpp": 2}, 4, {}),
    "buffers": ("deepseek_v3", {"tp": 2, "ep": 2}, 2, {}),
    "values": ("qwen3_moe-biases", {}, 2, {"value_head": True}),
    "shared": ("qwen3_moe", {"cp": 2, "ep": 2}, 2, {}),
}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    """Marks of a case."""
    family, sizes, world_size, settings = CASES[name]
    features = ["checkpoints packing", *(["critic"] if settings.get("value_head") else [])]
    features += ["optimizer_offload"] if "optimizer" in settings else []
    proof = proves(tiny_families.family_of(family), *runs_of({world_size: [sizes]}, " ".join(features)))
    return [proof] if name == "experts" else [proof, pytest.mark.long]


Saved = tuple[Path, Path, list[Any]]
"""A model's directory, its checkpoints, and what each rank of `_first` told."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    @cache
    def make(name: str) -> Saved:
        family, sizes, world_size, settings = CASES[name]
        root = tmp_path_factory.mktemp(name)
        tiny_families.make(family, root / "model", value_head=settings.get("value_head", False))
        first = run_distributed(
            _first, world_size, root / "model", root / "checkpoints", sizes, settings, timeout_s=180
        )
        return root / "model", root / "checkpoints", first

    return make


@pytest.mark.processes
@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
def test_a_resumed_engine_is_the_one_that_went_on(name: str, saved: Callable[[str], Saved]) -> None:
    model, root, first = saved(name)
    _, sizes, world_size, settings = CASES[name]
    for rank in first:
        for entry, size, computed in rank["entries"]:
            assert (entry.size, entry.checksum) == (size, computed)
    names = {path.name for path in (root / "background").iterdir()}
    assert names == {entry.path for rank in first for entry, _, _ in rank["entries"]}
    again = run_distributed(_again, world_size, model, root, sizes, settings, timeout_s=180)
    for before, after in zip(first, again, strict=True):
        assert after["loaded"].same_layout
        assert after["loaded"].optimizer_step == 2
        assert after["updates"] == before["updates"]
    assert_same(root / "loaded", root / "background")
    assert_same(root / "end-again", root / "end")
    assert_same(root / "loaded-again", root / "background")


@proves("qwen3_moe", *runs_of({1: [{}], 2: LAYOUTS[:4], 4: LAYOUTS[2:]}, "checkpoints packing"))
@proves("qwen3", *runs_of({2: LAYOUTS[:4]}, "checkpoints packing"))
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "world_size", "layouts"),
    [
        ("experts", 1, LAYOUTS[:1]),
        pytest.param("experts", 4, LAYOUTS, marks=pytest.mark.release),
        # Between them each layout, from one with expert parallelism and from one with two stages.
        pytest.param("bfloat16", 2, LAYOUTS[1:3], marks=pytest.mark.long),
        pytest.param("bfloat16", 2, LAYOUTS[:4], marks=pytest.mark.release),
        pytest.param("tied", 2, [LAYOUTS[0], LAYOUTS[3]], marks=pytest.mark.long),
        pytest.param("tied", 2, LAYOUTS[:4], marks=pytest.mark.release),
        pytest.param("shared", 1, LAYOUTS[:1], marks=pytest.mark.release),
    ],
)
def test_every_other_layout_holds_the_same(
    name: str, world_size: int, layouts: list[dict[str, Any]], saved: Callable[[str], Saved]
) -> None:
    model, root, first = saved(name)
    settings = CASES[name][3]
    loaded_by_rank = run_distributed(_elsewhere, world_size, model, root, layouts, settings, timeout_s=240)
    for number in range(len(layouts)):
        assert_same(root / f"elsewhere-{world_size}-{number}", root / "background")
    for rank in loaded_by_rank:
        for loaded, (norm, learning_rate) in rank:
            assert not loaded.same_layout
            assert loaded.optimizer_step == 2
            tolerance = 2e-2 if settings else 1e-4
            expected_norm, expected_rate = first[0]["updates"][0]
            assert norm == pytest.approx(expected_norm, rel=tolerance)
            assert learning_rate == expected_rate


def _refused(directory: Path, other: Path, root: Path) -> list[str]:
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    reported = []
    engine = build_engine(directory, {})
    checkpoint = EngineCheckpoint(engine)
    checkpoint.begin(_made(root / "fresh"), background=True)
    try:
        checkpoint.begin(root / "second", background=True)
    except EngineError as error:
        reported.append(str(error))
    checkpoint.finish()
    loaded = checkpoint.load(root / "fresh")
    reported.append(str(loaded.optimizer_step))
    update(engine, 0)
    # A file stands where a rank's own file has to be.
    blocked = _made(root / "blocked")
    if dist.get_rank() == 1:
        for number in range(4):
            (blocked / f"__1_{number}.distcp").mkdir()
    dist.barrier()
    checkpoint.begin(blocked, background=True)
    try:
        checkpoint.finish()
    except EngineError as error:
        reported.append(str(error))
    checkpoint.begin(_made(root / "given up"), background=True)
    checkpoint.abandon()
    checkpoint.begin(_made(root / "damaged"), background=False)
    checkpoint.finish()
    if dist.get_rank() == 1:
        shard = root / "damaged" / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    try:
        checkpoint.load(root / "damaged")
    except DamagedCheckpointError as error:
        reported.append(str(error))
    checkpoint.begin(_made(root / "after"), background=False)
    checkpoint.finish()
    engine.close()
    engine = build_engine(other, {}, load=False)
    try:
        EngineCheckpoint(engine).load(root / "after")
    except UserError as error:
        reported.append(str(error))
    engine.close()
    return reported


@pytest.mark.processes
def test_what_goes_wrong_is_said_on_every_rank_and_the_next_save_is_whole(tmp_path: Path) -> None:
    model, other, root = tmp_path / "model", tmp_path / "other", tmp_path / "checkpoints"
    tiny_families.make("llama", model)
    tiny_families.make("qwen3-biases", other)
    first, second = run_distributed(_refused, 2, model, other, root, timeout_s=300)
    in_flight, fresh, failed, damaged, stranger = first
    assert in_flight == f"save to {root}/second: the one to {root}/fresh is still in flight"
    assert fresh == "None"
    blocked = second[2]
    assert blocked.startswith(f"cannot write {root}/blocked/__1_") and blocked.endswith(": Is a directory")
    assert failed == f"save to {root}/blocked: rank 1 failed: {blocked}"
    # What one rank finds ends the load of all: the others would wait for it.
    assert second[3].startswith(f"{root}/damaged/__1_0.distcp is damaged: bytes ")
    assert damaged == f"load of {root}/damaged: rank 1: {second[3]}"
    assert "tensor model.layers.0." in stranger
    assert not (root / "blocked" / ".metadata").exists()
    assert read_all(root / "after")


def test_chunks_of_every_range_are_the_elements_of_the_range() -> None:
    columns = ((0, 4), (0, 3))
    row_cut = LocalParameter("row", (4, 3), (TensorSlice("a", ((0, 4), (6, 9)), columns),), owner=True, primary=True)
    two = LocalParameter(
        "two",
        (6, 3),
        (TensorSlice("b", ((2, 4), (0, 3)), ((0, 2), (0, 3))), TensorSlice("c", ((0, 3), (0, 3)), ((2, 5), (0, 3)))),
        owner=True,
        primary=True,
    )
    vector = LocalParameter("vector", (7,), (TensorSlice("d", ((3, 8),), ((0, 5),)),), owner=True, primary=True)
    for local in (row_cut, two, vector):
        count = torch.Size(local.shape).numel()
        expected = _elements(local)
        for start in range(count + 1):
            for stop in range(start, count + 1):
                for most in (1, 4, 100):
                    actual = {}
                    for chunk in flat_chunks(local, start, stop, most):
                        inside = list(itertools.product(*(range(*side) for side in chunk.box)))
                        assert len(inside) == chunk.length
                        for index, element in enumerate(inside):
                            actual[start + chunk.offset + index] = (chunk.hf_name, element)
                    assert actual == {at: element for at, element in expected.items() if start <= at < stop}


def _elements(local: LocalParameter) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Flat position in a parameter -> tensor and position in it."""
    positions = torch.arange(torch.Size(local.shape).numel()).view(local.shape)
    by_position = {}
    for region in local.slices:
        inside = positions[tuple(slice(*side) for side in region.local_box)]
        theirs = itertools.product(*(range(*side) for side in region.hf_box))
        for at, element in zip(inside.reshape(-1).tolist(), theirs, strict=True):
            by_position[at] = (region.hf_name, element)
    return by_position


def test_remainders_make_every_float() -> None:
    bits = torch.cat([torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64), torch.arange(-70_000, 70_000)])
    full = bits.to(torch.int32).view(torch.float32)
    full = full[full.isfinite()]
    high, low = split_remainder(full)
    assert torch.equal(join_remainder(high, low).view(torch.int32), full.view(torch.int32))
    normal = full.abs() > 1e-30
    error = (high.float() - full).abs()[normal] / full.abs()[normal]
    assert float(error[error.isfinite()].max()) <= 2**-8


def test_what_passes_through_host_memory_is_written_alone(tmp_path: Path) -> None:
    tensors = [torch.randn(40, 30), torch.randn(7).bfloat16(), torch.tensor(3.0), torch.randn(0, 4)]
    from engine3d.checkpoint.writing.staging import HostBuffer
    from engine3d.checkpoint.writing.writer import HashedFile, _save_tensor

    buffer, path = HostBuffer(), tmp_path / "tensors"
    with HashedFile(path) as file:
        for tensor in tensors:
            start = file.size
            _save_tensor(buffer.tensor(tensor.shape, tensor.dtype).copy_(tensor), file)
            file.sync()
            written = io.BytesIO(path.read_bytes()[start:])
            assert len(written.getbuffer()) < tensor.numel() * tensor.element_size() + 4096
            torch.testing.assert_close(torch.load(written, weights_only=True), tensor, rtol=0, atol=0)
