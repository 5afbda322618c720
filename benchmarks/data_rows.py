"""Cost of millions of rows as training prompts: time to encode and to open them, memory, shuffles, random access.

    python benchmarks/data_rows.py --directory SCRATCH --rows 10000000

prints one JSON object on stdout. It makes the rows in the scratch directory, as JSON lines and as Parquet, and trains a
byte-level BPE tokenizer on some of their texts. Then every way reads them in a process of its own:

- `jsonl`, `parquet`: `encode_files`, as `data.source=files` does, without and with its cache, and a `PromptSampler`;
- `datasets`: `datasets.load_dataset` and a batched `map` to the same token ids, without and with its cache;
- `list`: `read_jsonl` and `fit_prompts`, as `data.source=jsonl` does, everything in memory.

The last two read the first `--compared-rows`, and so do the first two beside them. All ways give the same token ids,
which is checked by their sums and those of some rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from hybridflow.data.files.config import ChatConfig, FilesConfig, FileSource
from hybridflow.data.files.encoding import encode_files
from hybridflow.data.sampler import PromptSampler
from hybridflow.data.tasks import read_jsonl
from hybridflow.data.tokenizer import fit_prompts, load_tokenizer

_MOST_TOKENS = 1024
_VOCABULARY = 8192
_BYTES_A_ROW = 1600
"""Room on the disk: both files, the rows and the token ids in the cache, and what `datasets` keeps of some."""
_BATCH = 1 << 16
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_rows(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Rows with a prompt of about 100 characters, an answer and another column; the same for the same seed."""
    generator = random.Random(seed)
    syllables = [first + second for first in "bcdfghklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(generator.choices(syllables, k=generator.choice((1, 2, 2, 3)))) for _ in range(4000)]
    for number in range(count):
        left, right = generator.randrange(10_000), generator.randrange(10_000)
        text = " ".join(generator.choices(words, k=14))
        yield {
            "prompt": f"{number}. {text}: what is {left} + {right}?",
            "answer": str(left + right),
            "subject": words[number % 100],
        }


def make_files(directory: Path, count: int) -> None:
    """Write `rows.jsonl`, `rows.parquet` and the directory `tokenizer`, unless they were kept."""
    made = directory / "made"
    if made.exists() and made.read_text() == str(count):
        return
    schema = pa.schema([(name, pa.string()) for name in ("prompt", "answer", "subject")])
    rows, some = make_rows(count), list[str]()
    lines, table = directory / "rows.jsonl", directory / "rows.parquet"
    with lines.open("w", encoding="utf-8") as text, pq.ParquetWriter(table, schema) as writer:
        while batch := [row for _, row in zip(range(_BATCH), rows, strict=False)]:
            text.writelines(f"{json.dumps(row)}\n" for row in batch)
            writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
            some = some or [row["prompt"] for row in batch[:20_000]]
    make_tokenizer(directory / "tokenizer", some)
    made.write_text(str(count))


def make_tokenizer(directory: Path, texts: Sequence[str]) -> None:
    """Train a byte-level BPE tokenizer with a chat template, and save it."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True)
class Way:
    """Reader of some rows.

    Args:
        name: "jsonl", "parquet", "datasets" or "list".
        directory: of the files.
        rows: how many of them are read, from the first.
        texts: as `data.files.chat.texts`.
        accesses: random ones that are timed.
    """

    name: str
    directory: Path
    rows: int
    texts: str
    accesses: int

    @property
    def cache(self) -> Path:
        """Cache of this reader alone."""
        return self.directory / "cache" / f"{self.name}-{self.rows}"

    def prompt(self, text: str) -> str:
        """A text as the model reads it."""
        template = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return text if self.texts == "raw" else template


@dataclass(frozen=True)
class Opened:
    """Rows that were read: the example and the token ids of an index, and the sum of all token ids."""

    example: Callable[[int], Any]
    tokens: Callable[[int], Sequence[int]]
    checksum: Callable[[], int]
    shuffled: Callable[[], Any]


def open_files(way: Way, tokenizer: PreTrainedTokenizerBase) -> Opened:
    """Open the rows as `data.source=files` does."""
    config = FilesConfig(
        train=(FileSource(path=(str(way.directory / f"rows.{way.name}"),), rows=way.rows),),
        chat=ChatConfig(texts=way.texts),  # type: ignore[arg-type]
        cache=way.cache,
    )
    prompts = encode_files(config.train, config, tokenizer, max_tokens=_MOST_TOKENS, policy="refuse")
    packed = prompts.tokens

    def checksum() -> int:
        tokens = packed.tokens  # type: ignore[attr-defined]
        return sum(int(tokens[begin : begin + _BATCH].sum(dtype=np.int64)) for begin in range(0, len(tokens), _BATCH))

    def shuffled() -> PromptSampler:
        sampler = PromptSampler(len(prompts), seed=0)
        sampler.next(1)
        return sampler

    return Opened(prompts.examples.__getitem__, packed.__getitem__, checksum, shuffled)


def open_datasets(way: Way, tokenizer: PreTrainedTokenizerBase) -> Opened:
    """`datasets`, with a map to token ids that it keeps."""
    import datasets

    datasets.disable_progress_bars()
    path, cache = way.directory / "rows.jsonl", str(way.cache)
    split = f"train[:{way.rows}]"
    rows = datasets.load_dataset("json", data_files=str(_head(path, way)), cache_dir=cache, split=split)

    def encoded(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = [way.prompt(text) for text in batch["prompt"]]
        return {"input_ids": tokenizer(texts, add_special_tokens=way.texts == "raw")["input_ids"]}

    mapped = rows.map(encoded, batched=True, new_fingerprint=f"tokens-{way.texts}")

    def checksum() -> int:
        return sum(
            int(chunk.flatten().to_numpy().sum(dtype=np.int64)) for chunk in mapped.data.column("input_ids").chunks
        )

    return Opened(mapped.__getitem__, lambda index: mapped[index]["input_ids"], checksum, lambda: mapped.shuffle(0))


def open_list(way: Way, tokenizer: PreTrainedTokenizerBase) -> Opened:
    """Open the rows as `data.source=jsonl` does."""
    examples = read_jsonl(_head(way.directory / "rows.jsonl", way))
    kept, tokens, _ = fit_prompts(tokenizer, examples, max_tokens=_MOST_TOKENS, policy="refuse")

    def shuffled() -> PromptSampler:
        sampler = PromptSampler(len(kept), seed=0)
        sampler.next(1)
        return sampler

    return Opened(kept.__getitem__, tokens.__getitem__, lambda: sum(map(sum, tokens)), shuffled)


def _head(path: Path, way: Way) -> Path:
    """A file of the first lines alone, for a way that has no other means to read no more."""
    head = way.directory / f"head-{way.rows}.jsonl"
    if not head.exists():
        with path.open("rb") as source, head.open("wb") as target:
            target.writelines(line for line, _ in zip(source, range(way.rows), strict=False))
    return head


_OPEN: dict[str, Callable[[Way, PreTrainedTokenizerBase], Opened]] = {
    "jsonl": open_files,
    "parquet": open_files,
    "datasets": open_datasets,
    "list": open_list,
}


class Memory:
    """The largest anonymous memory of this process, looked at a hundred times a second by a thread."""

    def __init__(self) -> None:
        self.largest, self._ended = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.largest = max(self.largest, anonymous_bytes())

    def stop(self) -> int:
        """End the thread; the largest in bytes."""
        self._ended.set()
        self._thread.join()
        return max(self.largest, anonymous_bytes())


def anonymous_bytes() -> int:
    """Anonymous memory of this process: RssAnon."""
    return _status_bytes("RssAnon")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"no {name} in /proc/self/status")


def read_once(way: Way) -> dict[str, Any]:
    """Read the rows of a way in this process: seconds, memory, and what random access costs."""
    tokenizer = load_tokenizer(way.directory / "tokenizer")
    before, memory = anonymous_bytes(), Memory()
    began = time.perf_counter()
    opened = _OPEN[way.name](way, tokenizer)
    seconds = time.perf_counter() - began
    resident = anonymous_bytes()
    began = time.perf_counter()
    shuffled = opened.shuffled()
    shuffle_seconds = time.perf_counter() - began
    indices = random.Random(1).choices(range(way.rows), k=way.accesses)
    began = time.perf_counter()
    sampled = sum(sum(opened.tokens(index)) for index in indices)
    token_seconds = time.perf_counter() - began
    began = time.perf_counter()
    for index in indices:
        opened.example(index)
    example_seconds = time.perf_counter() - began
    peak = max(memory.stop(), resident)
    del shuffled
    return {
        "seconds": seconds,
        "rows_per_second": way.rows / seconds,
        "anonymous_before_bytes": before,
        "anonymous_held_bytes": resident,
        "anonymous_peak_bytes": peak,
        "vm_hwm_bytes": _status_bytes("VmHWM"),
        "shuffle_seconds": shuffle_seconds,
        "tokens_us": 1e6 * token_seconds / way.accesses,
        "example_us": 1e6 * example_seconds / way.accesses,
        "checksums": [sampled, opened.checksum()],
    }


def in_own_process(way: Way) -> dict[str, Any]:
    """Call `read_once` in a process that has done nothing else."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(read_once, way).result()


def measure(way: Way) -> dict[str, Any]:
    """Read the rows in two processes, one after the other: the first finds no cache, the second has that of the first.

    What is kept in memory alone is read once.
    """
    shutil.rmtree(way.cache, ignore_errors=True)
    by_phase: dict[str, Any] = {}
    for name in ("encode",) if way.name == "list" else ("encode", "open"):
        by_phase[name] = in_own_process(way)
        print(f"{way.name}, {way.rows:,} rows, {name}: {json.dumps(by_phase[name])}", file=sys.stderr, flush=True)
    if way.cache.exists():
        by_phase["cache_bytes"] = sum(path.stat().st_size for path in way.cache.rglob("*") if path.is_file())
        shutil.rmtree(way.cache)
    return by_phase


def check_same(by_reader: dict[str, dict[str, Any]]) -> None:
    """Check that all readers have the same token ids."""
    checksums = {
        f"{name}, {phase}": by_phase[phase].pop("checksums")
        for name, by_phase in by_reader.items()
        for phase in ("encode", "open")
        if phase in by_phase
    }
    if len(set(map(tuple, checksums.values()))) > 1:
        raise UserError(f"the ways have different token ids: {checksums}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="data_rows.py", description="Rows of files as prompts: time, memory and random access.")
    parser.add_argument("--directory", type=Path, required=True, help="scratch directory")
    parser.add_argument("--keep", action="store_true", help="the made files, for another run with as many rows")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--compared-rows", type=int, default=200_000, help="that the other ways read")
    parser.add_argument("--formats", default="jsonl,parquet", help="that all rows are read in")
    parser.add_argument("--texts", choices=("raw", "user"), default="raw", help="user applies a chat template")
    parser.add_argument("--accesses", type=int, default=20_000, help="random ones that are timed")
    try:
        options = parser.parse_args(arguments)
        formats = _checked(options)
    except UserError as error:
        print(f"data_rows.py: {error}", file=sys.stderr)
        return 2
    scratch = options.directory / "data-rows"
    scratch.mkdir(parents=True, exist_ok=options.keep)
    try:
        with redirect_stdout(sys.stderr):
            result = _run(options, formats, scratch)
    finally:
        if not options.keep:
            shutil.rmtree(scratch)
    print(json.dumps(result, indent=2))
    return 0


def _run(options: argparse.Namespace, formats: Sequence[str], scratch: Path) -> dict[str, Any]:
    began = time.perf_counter()
    make_files(scratch, options.rows)
    print(f"{options.rows:,} rows are made in {time.perf_counter() - began:.0f} s", file=sys.stderr)

    def ways(names: Sequence[str], rows: int) -> dict[str, dict[str, Any]]:
        by_reader = {name: measure(Way(name, scratch, rows, options.texts, options.accesses)) for name in names}
        check_same(by_reader)
        return by_reader

    everything = ways(formats, options.rows)
    others = [*formats, "datasets", *(["list"] if options.texts == "raw" else [])]
    return {
        "rows": options.rows,
        "compared_rows": options.compared_rows,
        "texts": options.texts,
        "file_bytes": {name: (scratch / f"rows.{name}").stat().st_size for name in ("jsonl", "parquet")},
        "all": everything,
        "compared": ways(others, options.compared_rows),
        "versions": versions(),
    }


def _checked(options: argparse.Namespace) -> list[str]:
    for name in ("rows", "compared_rows", "accesses"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(options, name)}, expected at least 1")
    if options.compared_rows > options.rows:
        raise UserError(f"--compared-rows is {options.compared_rows} of {options.rows} rows, expected at most these")
    formats = options.formats.split(",")
    if not formats or not set(formats) <= {"jsonl", "parquet"}:
        raise UserError(f"--formats is {options.formats}, expected some of jsonl,parquet")
    if (options.directory / "data-rows").exists() and not options.keep:
        raise UserError(f"--directory: there is {options.directory / 'data-rows'} already; expected none, or --keep")
    options.directory.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(options.directory).free, options.rows * _BYTES_A_ROW
    if free < needed:
        raise UserError(
            f"--directory has {free >> 20:,} MiB of room, expected {needed >> 20:,} for {options.rows:,} rows"
        )
    return formats


if __name__ == "__main__":
    sys.exit(main())
