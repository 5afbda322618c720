"""Training speed of models.

    torchrun --nproc-per-node 4 benchmarks/train.py --model qwen3-30b-a3b --train ep=4,dp=4 --precision-aware

updates a model of random weights on random sequences, by this project's engine and by a bare Megatron-Core loop over
the same model and optimizer in turn, and prints one JSON object: also the most memory that tensors took beside what the
memory estimate foresees, and the seconds of a digest of the weights. One rank needs torchrun too.

- `--logprobs FILE`: the log-probs of the sequences before any update are written to the file; where it exists, they are
  compared with those in it, which another layout wrote. Weights and sequences are alike on all layouts with the same
  `tp`, `etp` and `dp`.
- with pipeline stages, updates of twice as many micro-batches tell how long a stage waits for others, compared with
  `Layout.bubble`.
- with `--settings '{"routing_replay": "update"}'` updates replay the routes of the pass that computes log-probs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.random_engine import leads, most, random_engine, random_sequences, say, timed, train_on
from benchmarks.reshard_plan import Parser, named_model, parse_layout, versions
from engine3d.checkpoint.digests.digest import weights_digest
from engine3d.errors import UserError
from engine3d.memory import copied_by_rank, resident_by_rank, update_peak
from engine3d.models.experts.routes import TokenRoutes
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.flops import PASSES_OF_AN_UPDATE, sequence_flops
from engine3d.training.passes.forward import TokenOutputs
from engine3d.training.passes.sequences import Sequences
from engine3d.training.update import UpdateResult

WAYS = ("engine", "bare")
_EMBEDDING_STD = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="train.py", description="Training throughput, beside that of a bare Megatron-Core loop.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--layers", type=int, help="of the model, where not all of them fit")
    parser.add_argument("--train", required=True, help="sizes of the trainer, such as ep=4,dp=4")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--logits-tokens", type=int, help="tokens whose logits are there at a time; else a micro-batch's"
    )
    parser.add_argument("--step-tokens", type=int, default=2**19, help="of a training step, over all ranks")
    parser.add_argument("--steps", type=int, default=3, help="of each way, after one that warms up")
    parser.add_argument("--ways", default=",".join(WAYS), help="of engine and bare")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of the optimizer")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--recompute-layers", type=int, help="of each stage, with --recompute full; else all")
    parser.add_argument("--offload", action="store_true", help="the optimizer's state, to host memory")
    parser.add_argument("--precision-aware", action="store_true", help="gradients and Adam's moments in bf16")
    parser.add_argument("--stages", help="layers of each virtual stage, such as 6,7,7,4; of similar cost if not given")
    parser.add_argument("--logprobs", type=Path, help="file to write log-probs to, or to compare them with")
    parser.add_argument("--megatron-experts", action="store_true", help="as train.fused_experts=false")
    parser.add_argument("--megatron", type=json.loads, default={}, help="JSON of further TransformerConfig fields")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON of further settings of `train`")
    parser.add_argument(
        "--profile", type=Path, help="file for the kernels of one step of the engine on rank 0; a trace if *.json.gz"
    )
    try:
        options = parser.parse_args(arguments)
        stats = _measure(options)
    except UserError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    if leads():
        command = " ".join(["benchmarks/train.py", *sys.argv[1:]])
        print(json.dumps({"command": command} | stats | {"versions": versions()}, indent=2))
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    ways = options.ways.split(",")
    if not set(ways) <= set(WAYS):
        raise UserError(f"--ways: found {options.ways!r}, expected one or more of {', '.join(WAYS)}")
    if options.offload and "bare" in ways:
        raise UserError("--offload: the bare loop does not offload; give --ways engine")
    if options.settings.get("predicted_expert_capacity") and "bare" in ways:
        raise UserError(
            "--settings: the bare loop does not look whether predicted_expert_capacity was enough; give --ways engine"
        )
    layout, spec = parse_layout(options.train), named_model(options.model)
    if options.stages is not None:
        layout = replace(layout, stages=tuple(map(int, options.stages.split(","))))
    if options.settings.get("routing_replay") and "bare" in ways:
        raise UserError("--settings: the bare loop replays no routes; give --ways engine")
    rows, left = divmod(options.step_tokens, options.sequence * layout.dp)
    if left or options.micro_batch_tokens % options.sequence or not rows:
        raise UserError(
            f"--step-tokens {options.step_tokens} and --micro-batch-tokens {options.micro_batch_tokens}: expected "
            f"multiples of --sequence {options.sequence}, the former of dp={layout.dp} sequences"
        )
    engine = random_engine(
        dict(spec.hf_config) | ({"num_hidden_layers": options.layers} if options.layers else {}),
        layout,
        embedding_std=_EMBEDDING_STD,
        dtype=options.dtype,
        optimizer=OptimizerConfig(lr=options.lr, precision_aware=options.precision_aware, offload=options.offload),
        micro_batch_tokens=options.micro_batch_tokens,
        logits_tokens=options.logits_tokens,
        recompute=options.recompute,
        recompute_layers=options.recompute_layers,
        fused_experts=not options.megatron_experts,
        megatron=options.megatron,
        **options.settings,
    )
    sequences = random_sequences(engine, options.step_tokens, options.sequence)
    stats: dict[str, Any] = {} if options.logprobs is None else _logprobs(engine, sequences, options.logprobs)
    if engine.config.routing_replay != "none":
        sequences, stats["replay"] = _with_routes(engine, sequences)
    results: list[UpdateResult] = []
    steps: dict[str, Callable[[], None]] = {
        "engine": lambda: results.append(train_on(engine, sequences)),
        "bare": lambda: _bare_step(engine, sequences.tokens.view(-1, options.sequence), options.step_tokens),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.steps + 1):
        for way in ways:
            took = timed(steps[way])
            if number:
                seconds[way].append(took)
            say(f"{way} {took:.2f} s{'' if number else ' (warms up)'}")
    if options.profile is not None:
        _profile(steps["engine"], options.profile)
    world = dist.get_world_size()
    flops = PASSES_OF_AN_UPDATE * float(sequence_flops(engine.spec, [options.sequence]).sum()) * rows * layout.dp
    stats |= {
        "device": torch.cuda.get_device_name() if platform.gpus else "CPU",
        "ranks": world,
        "layout": str(layout),
        "layers": engine.spec.sizes.layers,
        "parameters": engine.spec.parameter_count(),
        "flops_of_a_token": flops / options.step_tokens,
    }
    peak = platform.peak_flops
    for way, times in seconds.items():
        median = statistics.median(times)
        stats[way] = {
            "step_s": times,
            "tokens_per_s_per_device": options.step_tokens / median / world,
            "tflops_per_device": flops / median / world / 1e12,
            "mfu": None if peak is None else flops / median / world / peak,
        }
    if len(seconds) == len(WAYS):
        stats["engine_over_bare"] = statistics.median(seconds["bare"]) / statistics.median(seconds["engine"])
    if layout.pp > 1 and "engine" in ways:
        stats["bubble"] = _bubble(engine, options, statistics.median(seconds["engine"]), results)
    if results:
        stats["updates"] = {"first": _described(results[0]), "last": _described(results[-1])}
        if layout.pp == 1:
            stats["losses"] = [layout.dp * float(sum(result.loss_outputs)) for result in results]
    stats["peak_memory_bytes"] = most(platform.memory().peak)
    if "bare" not in seconds:  # whose logits are whole
        stats["foreseen_memory_bytes"] = most(_foreseen(engine))
    stats["digest_s"] = [timed(lambda: weights_digest(engine)) for _ in range(options.steps + 1)][1:]
    steps["engine"]()
    stats["digest_after_update_s"] = timed(lambda: weights_digest(engine))
    return stats


def _described(result: UpdateResult) -> dict[str, Any]:
    """Statistics of an update."""
    replay = None if result.replay is None else asdict(result.replay)
    return {"gradient_norm": result.grad_norm, "split_share": result.split_share, "replay": replay}


def _logprobs(engine: TrainEngine, sequences: Sequences, path: Path) -> dict[str, Any]:
    """Write log-probs of the current weights to a file, or compare them with those in it. Not for pipeline stages."""
    took: list[TokenOutputs | None] = []
    seconds = [timed(lambda: took.append(engine.logprobs(sequences))) for _ in range(2)][1]
    outputs = took[-1]
    if engine.layout.pp > 1 or outputs is None or outputs.logprobs is None:
        raise UserError(f"--logprobs: layout {engine.layout}, expected pp=1")
    if not path.exists():
        dist.barrier()
        if leads():
            torch.save({"tokens": sequences.tokens, "logprobs": outputs.logprobs}, path)
        return {"logprobs_s": seconds, "logprobs_mean": float(outputs.logprobs.mean())}
    kept = torch.load(path)
    if not torch.equal(kept["tokens"], sequences.tokens):
        raise UserError(f"--logprobs: {path} is of other sequences, expected the same sizes and dp")
    differences = (outputs.logprobs.double() - kept["logprobs"].double()).abs()
    return {
        "logprobs_s": seconds,
        "logprobs_mean": float(outputs.logprobs.mean()),
        "logprobs_of": str(path),
        "difference": {
            "tokens": len(differences),
            "mean": float(differences.mean()),
            "p99": float(differences.sort().values[int(0.99 * len(differences))]),
            "largest": float(differences.max()),
        },
    }


def _with_routes(engine: TrainEngine, sequences: Sequences) -> tuple[Sequences, dict[str, Any]]:
    """The sequences with the routes that the current weights choose, and what recording them costs."""
    plain = [timed(lambda: engine.logprobs(sequences)) for _ in range(2)][1]
    outputs: list[TokenOutputs | None] = []
    recording = [timed(lambda: outputs.append(engine.logprobs(sequences, record_routes=True))) for _ in range(2)][1]
    recorded = outputs[-1]
    if recorded is None or recorded.routes is None:
        raise UserError(f"--settings: routing_replay with layout {engine.layout}, expected pp=1")
    stats = {"logprobs_s": plain, "logprobs_and_routes_s": recording, "route_bytes": recorded.routes.nbytes}
    return replace(sequences, routes=TokenRoutes.of(recorded.routes, sequences.lengths)), stats


def _bubble(
    engine: TrainEngine, options: argparse.Namespace, seconds: float, results: list[UpdateResult]
) -> dict[str, Any]:
    """Time for which a stage waits over the time for which it computes, by updates of once and twice the micro-batches.

    What the second half takes is the time of its micro-batches alone. The optimizer's time is measured by itself.
    """
    longer = random_sequences(engine, 2 * options.step_tokens, options.sequence)
    train_on(engine, longer)
    twice = statistics.median(timed(lambda: train_on(engine, longer)) for _ in range(options.steps))
    optimizer = most(statistics.median(result.optimizer_s for result in results[-options.steps :]))
    computing = twice - seconds
    return {
        "stages": engine.spec.rules.stage_layers(engine.layout),
        "formula": results[-1].bubble,
        "measured": (seconds - optimizer - computing) / computing,
        "step_s_of_twice_the_micro_batches": twice,
        "optimizer_s": optimizer,
    }


def _foreseen(engine: TrainEngine) -> int:
    """Bytes of tensors of an update by the memory estimate."""
    at, config = engine.coordinates, engine.config
    built, tokens = platform.has_transformer_engine, config.micro_batch_tokens
    resident = resident_by_rank(engine.spec, engine.layout, at, config, transformer_engine=built)
    copies = copied_by_rank(
        engine.spec,
        engine.layout,
        at,
        config,
        tokens=tokens,
        serves=False,
        engine_precision=None,
        transformer_engine=built,
    )
    peak = update_peak(engine.spec, engine.layout, at, config, tokens=tokens).peak
    # Parts of a state in host memory come to the device once the backward pass is over.
    return resident.on_device + copies.total + max(peak, resident.staged)


def _bare_step(engine: TrainEngine, tokens: Tensor, step_tokens: int) -> None:
    """One step as Megatron-Core alone makes it: its own loss over rows of equal length, its schedule, its optimizer.

    Args:
        tokens: (rows, sequence) of this data-parallel rank.
        step_tokens: of all ranks, by which the loss is divided.
    """
    rows = engine.config.micro_batch_tokens // tokens.shape[1]
    batches = tokens.split(rows)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = losses.float().sum() / step_tokens
        return total, torch.zeros((), dtype=torch.int, device=engine.device), {"loss": total.detach()}

    def forward_step(data: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(data).to(engine.device)
        positions = torch.arange(batch.shape[1], device=engine.device).expand_as(batch)
        return model(batch, positions, None, labels=batch.roll(-1, 1)), partial(loss)

    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()
    engine._forward_backward(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=engine.chunks,
        num_microbatches=len(batches),
        seq_length=tokens.shape[1],
        micro_batch_size=rows,
        forward_only=False,
    )
    engine.optimizer.step()
    engine.scheduler.step(1)


def _profile(step: Callable[[], None], path: Path) -> None:
    """Profile one step on rank 0 with PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    traced = path.suffixes[-2:] == [".json", ".gz"]
    on_gpus = [ProfilerActivity.CUDA] if platform.gpus else []
    if not leads():
        timed(step)
        return
    with profile(activities=on_gpus if traced and on_gpus else [ProfilerActivity.CPU, *on_gpus]) as profiled:
        timed(step)
    if traced:
        profiled.export_chrome_trace(str(path))
        return
    orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if platform.gpus else [])]
    averages = profiled.key_averages()
    tables = [averages.table(sort_by=order, row_limit=60, max_name_column_width=110) for order in reversed(orders)]
    path.write_text("\n".join(tables))


if __name__ == "__main__":
    sys.exit(main())
