"""Log-probs of an engine compared with those of a trainer, with and without the engine's routes.

    python benchmarks/routing_replay.py --model qwen3-30b-a3b --layers 8 [--dtypes float32,bfloat16]

lets an engine respond to random prompts, and a trainer of one rank with the same weights compute the log-probs of the
responses: routed by its own routers, as with `train.routing_replay=none` (and `update`, whose first pass is the same),
and by the engine's routes, as with `rollout`. Prints a table of the absolute differences, the share of decisions (a
token in a layer with experts) in which the trainer's routers choose other experts than the engine's, and last one JSON
object, also with the seconds of the engine with and without routes, and with their bytes. With `rollout` the engine's
experts are used whatever the routers choose. Models without weights get random ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.reshard_plan import Parser, named_model, versions
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, model_spec
from engine3d.models.experts.routes import RouteFormat
from engine3d.platform import platform
from engine3d.rollout import Request, Response, RolloutConfig, RolloutEngine, SamplingConfig
from engine3d.stores import STORE_VARIABLE, file_address
from engine3d.training.config import TrainConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.sequences import ROUTES, Sequences

NONE, ROLLOUT = "none", "rollout"
_EMBEDDING_STD = 10.0
"""Standard deviation of random embeddings: tokens stay different in all layers, which then use all experts."""
_LIMIT_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="routing_replay.py", description="Log-probs of engine and trainer, with and without routes.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--layers", type=int, help="of the model, where not all of them are wanted")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of engine and trainer, one after another")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each response")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    try:
        options = parser.parse_args(arguments)
        dtypes = options.dtypes.split(",")
        if unknown := [dtype for dtype in dtypes if dtype not in ("float32", "bfloat16")]:
            raise UserError(f"--dtypes: {unknown[0]}, expected float32 or bfloat16")
        spec = named_model(options.model)
        if not spec.sizes.experts:
            raise UserError(f"--model: {spec.family.architecture} has no experts, expected a model with routes")
        with tempfile.TemporaryDirectory() as scratch:
            context, results = multiprocessing.get_context("spawn"), {}
            for dtype in dtypes:  # a process each, since a process has one trainer's groups
                with ProcessPoolExecutor(1, context) as pool:
                    results[dtype] = pool.submit(_measured, options, Path(scratch), dtype).result()
    except UserError as error:
        print(f"routing_replay.py: {error}", file=sys.stderr)
        return 2
    print("| dtype | routing_replay | tokens | mean | 99 % | largest | other choices | seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype, result in results.items():
        for mode in (NONE, ROLLOUT):
            row = result[mode]
            print(
                f"| {dtype} | {mode} | {row['tokens']:,} | {row['mean']:.2g} | {row['p99']:.2g} | "
                f"{row['largest']:.2g} | {row['different']:.3%} | {row['seconds']:.2f} |"
            )
    command = " ".join(["benchmarks/routing_replay.py", *sys.argv[1:]])
    device = "cuda" if platform.gpus else "cpu"
    print(json.dumps({"command": command, "device": device, "results": results, "versions": versions()}))
    return 0


def _measured(options: argparse.Namespace, scratch: Path, dtype: str) -> dict[str, Any]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ[STORE_VARIABLE] = file_address(scratch / f"store-{dtype}")
    model = _model(options, scratch, dtype)
    prompts = _prompts(options, named_model(str(model)).vocab_size)
    seconds_without, _ = _drawn(options, model, dtype, prompts, routes=False)
    seconds_with, responses = _drawn(options, model, dtype, prompts, routes=True)
    routes = [torch.from_numpy(response.routes.copy()) for response in responses if response.routes is not None]
    result: dict[str, Any] = {
        "engine_seconds": seconds_without,
        "engine_seconds_with_routes": seconds_with,
        "route_bytes": sum(rows.nbytes for rows in routes),
        "route_bytes_of_a_token": routes[0][:1].nbytes,
    }
    trainer = TrainEngine(
        model,
        TrainConfig(dtype=dtype, routing_replay="rollout", micro_batch_tokens=options.micro_batch_tokens),
        Layout(),
        trainable=False,
    )
    sequences = [[*prompt, *response.token_ids] for prompt, response in zip(prompts, responses, strict=True)]
    format = RouteFormat.of(trainer.spec.sizes)
    complete = torch.cat([torch.cat([rows, format.empty(1)]) for rows in routes])
    for mode in (NONE, ROLLOUT):
        columns = {ROUTES: complete} if mode == ROLLOUT else {}
        result[mode] = _distances(trainer, sequences, columns, responses, complete, format)
    return result


def _model(options: argparse.Namespace, scratch: Path, dtype: str) -> Path:
    """Return a directory with weights in a dtype."""
    directory = Path(options.model)
    if any(directory.glob("*.safetensors")):
        if options.layers:
            raise UserError(f"--layers: {directory} has weights of all of its layers; expected no --layers")
        return directory
    config = dict(named_model(options.model).hf_config)
    if options.layers:
        config["num_hidden_layers"] = options.layers
    made = scratch / dtype
    initialise_random(model_spec(config), made, 0, getattr(torch, dtype), embedding_std=_EMBEDDING_STD)
    return made


def _prompts(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Return the prompt of each sample."""
    draw = random.Random(0)
    drawn = [[draw.randrange(vocabulary) for _ in range(options.input)] for _ in range(options.prompts)]
    return [prompt for prompt in drawn for _ in range(options.samples)]


def _drawn(
    options: argparse.Namespace, model: Path, dtype: str, prompts: Sequence[list[int]], *, routes: bool
) -> tuple[float, list[Response]]:
    """Return an engine's responses, and the seconds from requests to responses, after once that warms up."""
    config = RolloutConfig(
        dtype=dtype,  # type: ignore[arg-type]
        context_length=options.input + options.output,
        max_running_requests=len(prompts),
        mem_fraction_static=0.5,
        request_timeout_s=_LIMIT_S,
        routes=routes,
    )
    sampling = SamplingConfig(max_new_tokens=options.output, ignore_eos=True)
    with RolloutEngine(model, config) as engine:
        for first in (0, len(prompts)):
            requests = [
                Request(first + number, prompt, sampling, (first + number) // options.samples, number % options.samples)
                for number, prompt in enumerate(prompts)
            ]
            began = time.perf_counter()
            engine.submit(requests, together=True)
            responses = engine.wait_for([request.sample for request in requests])
            seconds = time.perf_counter() - began
    return seconds, responses


def _distances(
    trainer: TrainEngine,
    sequences: Sequence[list[int]],
    columns: dict[str, Tensor],
    responses: Sequence[Response],
    routes: Tensor,
    format: RouteFormat,
) -> dict[str, Any]:
    """Compare a trainer's log-probs and experts with an engine's."""
    given = Sequences.of(sequences, **columns)
    trainer.logprobs(given)
    platform.synchronize()
    began = time.perf_counter()
    outputs = trainer.logprobs(given)
    platform.synchronize()
    seconds = time.perf_counter() - began
    recorded = trainer.logprobs(given, record_routes=True)
    assert outputs is not None and outputs.logprobs is not None and recorded is not None
    assert recorded.routes is not None
    distances, is_known = [], (routes != format.missing).all(1)
    start = 0
    for sequence, response in zip(sequences, responses, strict=True):
        start += len(sequence)
        drawn = outputs.logprobs[start - len(response.token_ids) : start]
        distances.append((drawn.double() - torch.tensor(response.logprobs).double()).abs())
    differences = torch.cat(distances)
    layers = (len(format.layers), format.topk)
    trainers, engines = (rows[is_known].unflatten(1, layers).sort(-1).values for rows in (recorded.routes, routes))
    return {
        "tokens": len(differences),
        "mean": float(differences.mean()),
        "p99": float(differences.quantile(0.99)),
        "largest": float(differences.max()),
        "different": float((trainers != engines).any(-1).double().mean()),
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
