"""The digest of weights: of their bits, each in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine3d.checkpoint.digests import digest as digests
from engine3d.checkpoint.digests.digest import Digest, factors, share_of, weights_digest
from engine3d.training import host_state
from tests.support.interpreted import run_interpreted
from tests.support.ptx import compiled_for_hopper

CPU = torch.device("cpu")


def digest(*tensors: torch.Tensor) -> str:
    digest_of = Digest(CPU, sum(tensor.nbytes for tensor in tensors))
    for tensor in tensors:
        digest_of.add(tensor)
    return digest_of.text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_bit_and_every_place_counts(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    known, before = {digest(values)}, values.clone()
    assert torch.equal(values, before) and digest(values) in known
    for position in (0, 1, 500, 999):
        other = values.clone()
        other[position] = torch.nextafter(other[position].float(), torch.tensor(9.0)).to(dtype) + 0.5
        assert digest(other) not in known
        known.add(digest(other))
    swapped = values.clone()
    swapped[[3, 4]] = values[[4, 3]]
    assert digest(swapped) not in known
    assert digest(-values) not in known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int16])
def test_wherever_a_tensor_lies_and_ends_its_bits_count(dtype: torch.dtype) -> None:
    within = torch.randint(-(2**15), 2**15, (64,), generator=torch.Generator().manual_seed(3)).to(dtype)
    for start, length in ((0, 64), (1, 17), (2, 8), (3, 1), (4, 7)):
        values = within[start : start + length]
        assert digest(values) == digest(values.clone())
        assert len({digest(values), digest(values[:-1]), digest(torch.cat((values, values.new_zeros(1))))}) == 3


@pytest.mark.parametrize("at", range(0, 64, 7))
def test_the_same_bit_of_two_words_counts(at: int) -> None:
    values = torch.randint(-(2**62), 2**62, (512,), generator=torch.Generator().manual_seed(4))
    other = values.clone()
    other[[3, 400]] ^= 1 << at if at < 63 else -(2**63)
    assert len({digest(values), digest(other), digest(~values)}) == 3


def test_what_is_larger_than_a_chunk_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine3d.checkpoint.digests.digest._CHUNK", 64)
    values = torch.randn(100, generator=torch.Generator().manual_seed(5))
    known = {digest(values), digest(values[:50], values[50:])}
    for position in (0, 15, 16, 17, 63, 99):
        other = values.clone()
        other.view(torch.int32)[position] ^= 1 << 31
        known |= {digest(other), digest(other[:50], other[50:])}
    other = values.clone()
    other[:16], other[16:32] = values[16:32], values[:16]  # two chunks
    assert len(known | {digest(other)}) == 15


def test_the_least_bit_counts_and_tensors_stand_in_an_order() -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(2))
    other = values.clone()
    other.view(torch.int32)[17] ^= 1
    assert digest(values) != digest(other)
    one, two = values[:32], values[32:]
    assert len({digest(one, two), digest(two, one), digest(values), digest(one, two, torch.zeros(1))}) == 4
    assert digest(torch.zeros(1)) != digest(torch.zeros(2))
    assert len(digest(values)) == 16


@pytest.mark.parametrize("chunk", [64, 1 << 25])
def test_the_shares_of_some_stand_for_reading_them(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(digests, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(6)
    sizes = (4, 12, 128, 32, 8, 36)
    tensors = [torch.randint(-(2**15), 2**15, (size,), generator=generator, dtype=torch.int16) for size in sizes]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    starts = [sum(tensor.nbytes for tensor in tensors[:number]) for number in range(len(tensors))]
    of_words = factors(nbytes, CPU)

    def share(number: int) -> torch.Tensor:
        value = share_of(tensors[number], starts[number], nbytes, of_words)
        assert value is not None
        return value

    for shared in ([2], [0, 1, 2, 3, 4, 5], [1, 5]):
        digest_of = Digest(CPU, nbytes)
        for number, values in enumerate(tensors):
            if number in shared:
                digest_of.skip([values.nbytes], [share(number)])
            else:
                digest_of.add(values)
        assert digest_of.text() == digest(*tensors)
    together = Digest(CPU, nbytes)
    together.add(tensors[0])
    together.skip([tensor.nbytes for tensor in tensors[1:]], [share(number) for number in range(1, 6)])
    assert together.text() == digest(*tensors)
    # A tensor that is not made of words, or does not begin on one, is read.
    assert share_of(tensors[0][:3], 0, 6, of_words) is None and share_of(tensors[0], 2, 10, of_words) is None
    assert share_of(tensors[2][1:5], 0, 8, of_words) is None


class _Halves(torch.optim.SGD):
    """Keeps half of each master weight in its state, as Transformer Engine's Adam, and changes both."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("master_param", torch.zeros(parameter.shape, dtype=torch.int16))
                state["master_param"] += 3
                parameter.data += 1


def test_master_weights_in_host_memory_are_read_once_by_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.arange(size).bfloat16()) for size in (8, 6, 16, 4)]
    inner = _Halves([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=1.0)
    optimizer = SimpleNamespace(optimizer=inner, is_stub_optimizer=False)
    state = host_state.HostState(optimizer, CPU, host_state.CHUNK_BYTES // 512)
    shards = [
        SimpleNamespace(
            optimizer=optimizer,
            moments=inner.state[parameter],
            weight_tensors=lambda parameter=parameter: (
                parameter.data,
                *([inner.state[parameter]["master_param"]] if "master_param" in inner.state[parameter] else []),
            ),
        )
        for parameter in parameters
    ]
    monkeypatch.setattr(digests, "parameter_shards", lambda engine: shards)
    engine: Any = SimpleNamespace(device=CPU, host_state=state)
    shares: list[int] = []
    taken = digests._Shares.taken

    def counted(self: Any) -> Any:
        shares_taken = taken(self)
        shares.append(len(shares_taken))
        return shares_taken

    monkeypatch.setattr(digests._Shares, "taken", counted)

    def right() -> str:
        return digest(*(tensor for shard in shards for tensor in shard.weight_tensors()))

    assert weights_digest(engine) == right() and state.watch is None  # there is no state yet
    inner.step()
    assert weights_digest(engine) == right() and state.watch is not None and not shares
    inner.step()
    inner.step()
    # The second has 12 bytes, which is no multiple of a word.
    assert weights_digest(engine) == right() and shares == [3]
    assert weights_digest(engine) == right() and shares == [3, 0]  # without an update all is read
    inner.step()
    inner.state[parameters[0]]["master_param"] -= 1  # as a checkpoint that is loaded
    state.make(lambda inner, parameter: None)
    assert state.watch is None and weights_digest(engine) == right()
    state.release()


def _bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """(count,) of any bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (count * dtype.itemsize,), generator=generator, dtype=torch.int8).view(dtype)


@contextmanager
def _small_runs(chunk: int) -> Iterator[None]:
    """Limit runs to three loads, the last one incomplete. Chunks end within them."""
    from engine3d.checkpoint.digests import kernels as digest_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "_CHUNK", chunk)
        patch.setattr(digest_kernels, "_RUN", 20)
        patch.setattr(digest_kernels, "_WIDTH", 8)
        yield


def _shares_of_kernel(device: str) -> None:
    for chunk in (264, 320, 8, 1 << 25):
        with _small_runs(chunk):
            _compare(device)
    if device == "cuda":
        _compare(device, times=20000)  # several runs and chunks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(digests, "_CHUNK", 1 << 17)
            _compare(device, times=500)


def _compare(device: str, times: int = 1) -> None:
    from engine3d.checkpoint.digests import kernels as digest_kernels

    kinds = [
        *((torch.bfloat16, size) for size in (4, 12, 0, 400, 64, 0)),
        *((torch.int16, size) for size in (4, 300, 36)),
        *((torch.float32, size) for size in (2, 258, 66)),
        (torch.int64, 1),
    ]
    tensors = [_bits(size * times, dtype, seed) for seed, (dtype, size) in enumerate(kinds)]
    starts = [8 + sum(tensor.nbytes for tensor in tensors[:number]) for number in range(len(tensors))]
    nbytes = 8 + sum(tensor.nbytes for tensor in tensors) + 16
    of_words, chunks = factors(nbytes, CPU), digests._chunks(nbytes)
    for chosen in (range(len(kinds)), (9, 1, 12), (7,), (2,), (2, 5)):
        owners = [position // 2 for position, _ in enumerate(chosen)]
        expected = torch.full((owners[-1] + 2,), 3)
        for owner, number in zip(owners, chosen, strict=True):
            share = share_of(tensors[number], starts[number], nbytes, of_words)
            assert share is not None
            expected[owner] += share
        there, into = [tensors[number].to(device) for number in chosen], torch.full_like(expected, 3).to(device)
        of_chunk = {"chunk": digests._chunk_bytes(nbytes), "chunks": chunks}
        table = digest_kernels.add_shares(there, [starts[number] for number in chosen], owners, into, **of_chunk)
        assert torch.equal(into.cpu(), expected) and (into[-1] == 3)
        assert (table.device == CPU and len(table)) or not sum(tensor.numel() for tensor in there)


class _OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


def _watch_of_kernel(device: str) -> None:
    """Tensors that an update takes in, some of the parameters with a kernel, are not read again."""
    from engine3d.checkpoint.digests import kernels as digest_kernels

    def there(values: torch.Tensor) -> torch.Tensor:
        return values.to(device) if device == "cuda" else values.as_subclass(_OnGpu)

    parameters = [there(_bits(size, torch.bfloat16, size)) for size in (64, 6, 300, 32)]
    masters = [there(_bits(len(parameter), torch.int16, 7)) for parameter in parameters]
    parameters.append(there(torch.zeros(18)))
    masters.append(there(_bits(18, torch.float32, 8)))
    states = [{"master_param": master, "exp_avg": master} for master in masters]
    weights = [*zip(parameters[:4], masters[:4], strict=True), (masters[4],)]
    read: list[int] = []

    def weight_tensors(number: int) -> tuple[torch.Tensor, ...]:
        read.append(number)
        return weights[number]

    shards: Any = [
        SimpleNamespace(optimizer=object(), moments=state, weight_tensors=lambda number=number: weight_tensors(number))
        for number, state in enumerate(states)
    ]
    launches: list[int] = []
    add_shares = digest_kernels.add_shares

    def counted(values: Any, *arguments: Any, **settings: Any) -> torch.Tensor:
        launches.append(len(values))
        return add_shares(values, *arguments, **settings)

    with _small_runs(264), pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_kernels, "add_shares", counted)
        watch = digests._Shares.of(shards, [tuple(tensor.nbytes for tensor in of_one) for of_one in weights])
        assert watch is not None
        engine: Any = SimpleNamespace(device=torch.device(device), host_state=SimpleNamespace(watch=watch))
        pairs = list(zip(parameters, states, strict=True))
        right = digest(*(tensor.as_subclass(torch.Tensor).cpu() for of_one in weights for tensor in of_one))
        for _ in range(2):
            read.clear()
            launches.clear()
            watch(pairs[:2])
            watch([*pairs[3:1:-1], (parameters[0], {"master_param": masters[0]})])  # the last is the state of no shard
            watch(pairs[4:])
            watch([])
            assert launches == [2, 4, 1]
            # The second has 12 bytes, which is no multiple of a word.
            assert weights_digest(engine) == right and read == [1]
        assert weights_digest(engine) == right and read == [1, 0, 1, 2, 3, 4]


@pytest.mark.processes
@pytest.mark.parametrize("function", [_shares_of_kernel, _watch_of_kernel])
def test_the_kernel_interpreted(function: Any) -> None:
    run_interpreted(function)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("function", [_shares_of_kernel, _watch_of_kernel])
def test_the_kernel_on_a_gpu(function: Any) -> None:
    function("cuda")


@pytest.mark.slow
def test_the_kernel_compiles_without_a_gpu() -> None:
    from engine3d.checkpoint.digests import kernels as digest_kernels

    text = compiled_for_hopper(
        digest_kernels._add_shares,
        {"table": "*i64", "into": "*i64"},
        {"COLUMNS": digest_kernels._COLUMNS, "SPREAD": digests.SPREAD, "WIDTH": digest_kernels._WIDTH},
        whole_words=("table", "into"),
    )
    assert text.count("atom.global.gpu.relaxed.add.u64") == 1
