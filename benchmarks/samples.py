"""Cost of moving samples from engines to updates: bytes and host time, end to end and as padded rows.

    python benchmarks/samples.py --samples 512 --mean 4096 --longest 32768 --ranks 8

prints one JSON object on stdout. Both ways begin with the lists that engines give and end with the sequences that
`TrainEngine.update` reads on each of the data-parallel ranks, through Ray's object store of this host:

- `ragged`: `SampleBatch` and `RemoteBatch`, as a run does it;
- `padded`: every column as rows of the longest prompt and the longest response, which are padded, put, dealt by row and
  cut again.

Lengths of responses are drawn from a log-normal distribution with the mean that is asked for, cut off at the longest;
one response is the longest; all are where the mean is. Both ways give the same sequences, bit for bit; this is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import ray
import torch
from torch import Tensor

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.training.passes.sequences import Sequences
from hybridflow.batch.load_balance import balanced_partition
from hybridflow.batch.remote_batch import BatchShard, RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import within
from hybridflow.batch.worker_output import Columns, Packed, pack
from hybridflow.cluster.ray.ray_session import start_ray, stop_ray
from hybridflow.roles.model import to_sequences

_SPREAD = 1.0
"""Standard deviation of the logarithm of response lengths."""
_ADDED = ("ref_logprobs", "advantages")
"""Columns that ranks add, as a run with a reference and a critic does."""
_VOCABULARY = 150_000


@dataclass(frozen=True)
class Case:
    """Outputs of engines, and columns that ranks add."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logprobs: list[list[float]]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [len(prompt) + len(response) for prompt, response in zip(self.prompts, self.responses, strict=True)]


def make_case(samples: int, mean: int, longest: int, prompt: int, seed: int = 0) -> Case:
    """Samples with responses of these lengths: all of one length where that is their mean and their longest."""
    random = np.random.default_rng(seed)
    counts = np.full(samples, longest)
    if mean < longest:
        lengths = np.exp(random.normal(0.0, _SPREAD, samples))
        # The cut lowers the mean: scaled until it is what was asked for.
        scale = mean / lengths.mean()
        for _ in range(50):
            scale *= mean / np.clip(scale * lengths, 1, longest).mean()
        counts = np.clip(scale * lengths, 1, longest).astype(int)
        counts[int(counts.argmax())] = longest
    prompts = random.integers(1, 2 * prompt, samples)
    return Case(
        [random.integers(0, _VOCABULARY, count).tolist() for count in prompts],
        [random.integers(0, _VOCABULARY, count).tolist() for count in counts],
        [random.normal(-1.0, 0.3, count).astype(np.float32).tolist() for count in counts],
    )


class Clock:
    """Adds up the host seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__[T](self, stage: str, action: Callable[[], T]) -> T:
        """Run `action` and return its result; its time counts for the stage."""
        began = time.perf_counter()
        made = action()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - began
        return made


def _properties(samples: int) -> dict[str, Any]:
    return {
        "sample_ids": range(samples),
        "group_ids": range(samples),
        "prompt_indices": range(samples),
        "policy_versions": [1] * samples,
        "finish_reasons": ["stop"] * samples,
    }


def ragged(case: Case, shards: Sequence[Sequence[int]], clock: Clock) -> tuple[list[Sequences], int]:
    """Move the samples as a run does. Return the sequences of each rank, and the bytes that were put into the object
    store.
    """
    batch = clock(
        "lists to tensors",
        lambda: SampleBatch.from_generations(
            prompts=case.prompts,
            responses=case.responses,
            logprobs=case.logprobs,
            **_properties(len(case.prompts)),
        ),
    )
    remote = clock("put", lambda: RemoteBatch.of(batch))
    stored = _nbytes(_packed(batch).arrays)
    # What ranks found: each keeps the columns of its part.
    here = frozenset({ray.get_runtime_context().get_node_id()})
    for name in _ADDED:
        calls = _ReadyColumns(
            [], [next(iter(here))] * len(shards), [tuple(rows) for rows in shards], remote.per_sample["sample_ids"]
        )
        for rows in shards:
            columns = Columns({name: batch.select(rows).logprobs * 0.5})
            stored += _nbytes(_packed(columns).arrays)
            calls.refs.append(clock("put", lambda columns=columns: ray.put(pack(columns)[0])))  # type: ignore[misc]
        remote = remote.with_columns(calls)
    dealt = clock("deal", lambda: remote.shard(shards, [here] * len(shards)))
    return [_sequences(shard, clock) for shard in dealt], stored


def _sequences(shard: BatchShard, clock: Clock) -> Sequences:
    samples = clock("fetch", shard.unpack)
    assert isinstance(samples, SampleBatch) and samples.ref_logprobs is not None and samples.advantages is not None
    columns = {"logprobs": samples.logprobs, "ref_logprobs": samples.ref_logprobs, "advantages": samples.advantages}
    return clock("cut", lambda: to_sequences(samples, routes=None, **columns))


def _packed(result: SampleBatch | Columns) -> Packed:
    packed, _ = pack(result)
    assert isinstance(packed, Packed)
    return packed


@dataclass
class _ReadyColumns:
    """Columns that are ready, as `RemoteBatch.with_columns` needs of a call."""

    refs: list[ray.ObjectRef]
    nodes: list[str]
    shard_indices: list[tuple[int, ...]] | None
    sample_ids: Tensor | None

    def wait(self) -> None:
        """Return at once."""


def padded(case: Case, shards: Sequence[Sequence[int]], clock: Clock) -> tuple[list[Sequences], int]:
    """The same by rows that are padded on the right."""
    rows = clock(
        "lists to tensors",
        lambda: {
            "input_ids": _pad(case.prompts, torch.int64),
            "generated_ids": _pad(case.responses, torch.int64),
            "response_mask": _pad([[True] * len(response) for response in case.responses], torch.bool),
            "logprobs": _pad(case.logprobs, torch.float32),
        },
    )
    lengths = [torch.tensor([len(row) for row in lists]) for lists in (case.prompts, case.responses)]
    arrays = {name: column.numpy() for name, column in rows.items()}
    stored = _nbytes(arrays)
    arrays_ref = clock("put", lambda: ray.put(arrays))
    added: dict[str, list[ray.ObjectRef]] = {name: [] for name in _ADDED}
    for refs in added.values():
        for shard_rows in shards:
            width = max(len(case.responses[index]) for index in shard_rows)
            column = (rows["logprobs"][list(shard_rows), :width] * 0.5).numpy()
            stored += column.nbytes
            refs.append(clock("put", lambda column=column: ray.put(column)))  # type: ignore[misc]
    made = []
    for number, shard_rows in enumerate(shards):
        taken = list(shard_rows)
        columns_refs = {name: refs[number] for name, refs in added.items()}
        columns = clock("fetch", lambda taken=taken, added=columns_refs: _fetched(arrays_ref, added, taken, lengths))  # type: ignore[misc]
        prompts, responses = lengths[0][taken], lengths[1][taken]
        made.append(clock("cut", lambda c=columns, p=prompts, r=responses: _cut(c, p, r)))  # type: ignore[misc]
    return made, stored


def _pad(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    column = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    for index, row in enumerate(rows):
        column[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return column


def _fetched(
    arrays_ref: ray.ObjectRef, added: Mapping[str, ray.ObjectRef], taken: list[int], lengths: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The rows of a rank, no wider than its longest prompt and response."""
    arrays: dict[str, np.ndarray[Any, Any]] = ray.get(arrays_ref)
    widths = [int(column[taken].max()) for column in lengths]
    columns = {
        name: torch.from_numpy(array[taken])[:, : widths[name != "input_ids"]].contiguous()
        for name, array in arrays.items()
    }
    return columns | {name: torch.from_numpy(ray.get(ref).copy()) for name, ref in added.items()}


def _cut(columns: Mapping[str, Tensor], prompts: Tensor, responses: Tensor) -> Sequences:
    """Padded rows as sequences."""
    lengths, mask = prompts + responses, within(responses, columns["generated_ids"])
    starts = lengths.cumsum(0) - responses
    at = (starts[:, None] + torch.arange(mask.shape[1]))[mask]
    tokens = torch.empty(int(lengths.sum()), dtype=torch.int64)
    is_response = torch.zeros(len(tokens), dtype=torch.bool)
    is_response[at] = True
    tokens[~is_response] = columns["input_ids"][within(prompts, columns["input_ids"])]
    tokens[at] = columns["generated_ids"][mask]
    flat = {}
    for name in ("logprobs", *_ADDED):
        flat[name] = torch.zeros(len(tokens))
        flat[name][at] = columns[name][mask]
    return Sequences(tokens, lengths, flat)


def _nbytes(arrays: Mapping[str, np.ndarray[Any, Any]]) -> int:
    return sum(array.nbytes for array in arrays.values())


def measure(case: Case, ranks: int, repeats: int) -> dict[str, Any]:
    """Both ways, one after the other, `repeats` times; the median of each stage."""
    shards = balanced_partition([float(length) for length in case.lengths], ranks)
    ways: dict[str, Callable[[Case, Sequence[Sequence[int]], Clock], tuple[list[Sequences], int]]] = {
        "padded": padded,
        "ragged": ragged,
    }
    clocks: dict[str, list[Clock]] = {way: [] for way in ways}
    stored: dict[str, int] = {}
    made: dict[str, list[Sequences]] = {}
    for _ in range(repeats):
        for way, run in ways.items():
            clocks[way].append(Clock())
            made[way], stored[way] = run(case, shards, clocks[way][-1])
    for one, other in zip(made["padded"], made["ragged"], strict=True):
        if not _same(one, other):
            raise UserError("the two ways gave different sequences")
    results: dict[str, Any] = {}
    for way in ways:
        stages = {
            stage: float(np.median([clock.seconds[stage] for clock in clocks[way]])) for stage in clocks[way][0].seconds
        }
        results[way] = {
            "stored_bytes": stored[way],
            "host_seconds": float(np.median([sum(clock.seconds.values()) for clock in clocks[way]])),
            "stages_seconds": stages,
        }
    results["ragged_of_padded"] = {
        figure: results["ragged"][figure] / results["padded"][figure] for figure in ("stored_bytes", "host_seconds")
    }
    return results


def _same(one: Sequences, other: Sequences) -> bool:
    return (
        torch.equal(one.tokens, other.tokens)
        and torch.equal(one.lengths, other.lengths)
        and one.columns.keys() == other.columns.keys()
        and all(torch.equal(column, other.columns[name]) for name, column in one.columns.items())
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="samples.py", description="Samples from engines to updates, end to end and as padded rows.")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--mean", type=int, default=4096, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest response")
    parser.add_argument("--prompt", type=int, default=256, help="mean tokens of a prompt")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks")
    parser.add_argument("--repeats", type=int, default=5)
    try:
        options = parser.parse_args(arguments)
        _check(options)
    except UserError as error:
        print(f"samples.py: {error}", file=sys.stderr)
        return 2
    with redirect_stdout(sys.stderr):
        case = make_case(options.samples, options.mean, options.longest, options.prompt)
        start_ray(cpu_slots=1)
        try:
            results = measure(case, options.ranks, options.repeats)
        finally:
            stop_ray()
    described = {
        "samples": options.samples,
        "tokens": sum(case.lengths),
        "mean_response": sum(map(len, case.responses)) / options.samples,
        "longest_response": max(map(len, case.responses)),
        "ranks": options.ranks,
        "repeats": options.repeats,
    }
    print(json.dumps(described | results | {"versions": versions()}, indent=2))
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("samples", "mean", "longest", "prompt", "ranks", "repeats"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)}, expected at least 1")
    if options.mean > options.longest:
        raise UserError(
            f"--mean is {options.mean} and --longest {options.longest}, expected none shorter than the mean"
        )
    if options.samples < options.ranks:
        raise UserError(f"--samples is {options.samples} for {options.ranks} ranks, expected at least as many")


if __name__ == "__main__":
    sys.exit(main())
