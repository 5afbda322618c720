"""Log-probs of an engine and a trainer, and of a trainer before and after an update, with and without given routes.

    python benchmarks/routing_replay.py --model qwen3-30b-a3b --layers 8 [--dtypes float32,bfloat16]

lets an engine respond to random prompts, and a trainer of one rank with the same weights compute the log-probs of the
responses: routed by its own routers, as with `train.routing_replay=none` (and `update`, whose first pass is the same),
and by the engine's routes, as with `rollout`. Then the trainer makes one optimizer step on the responses, with random
advantages and the routes of its own pass. Its log-probs before and after the step are compared: routed by its own
routers, as with `none`, and after the step by the routes from before it, as with `update`.

Prints a table of the absolute differences, the share of decisions (a token in a layer with experts) in which the
trainer's routers choose other experts than the engine's, or than before the step, and last one JSON object, also with
the seconds of the engine with and without routes, and with their bytes. With `rollout` and `update` the given experts
are used whatever the routers choose. Models without weights get random ones.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.reshard_plan import Parser, named_model, versions
from engine3d.errors import UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, model_spec
from engine3d.models.experts.routes import RouteFormat, TokenRoutes
from engine3d.platform import platform
from engine3d.rendezvous import STORE_VARIABLE, file_address
from engine3d.rollout import Request, Response, RolloutConfig, RolloutEngine, SamplingConfig
from engine3d.training.config import OptimizerConfig, TrainConfig
from engine3d.training.engine import TrainEngine
from engine3d.training.passes.forward import TokenOutputs
from engine3d.training.passes.sequences import Sequences

NONE, UPDATE, ROLLOUT = "none", "update", "rollout"
STEP = "after_step"
"""Results that compare log-probs before and after an optimizer step."""
_EMBEDDING_STD = 10.0
"""Standard deviation of random embeddings: tokens stay different in all layers, which then use all experts."""
_LIMIT_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="routing_replay.py", description="Log-probs with and without given routes.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--layers", type=int, help="of the model, where not all of them are wanted")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of engine and trainer, one after another")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="responses to each prompt")
    parser.add_argument("--input", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of each response")
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate of the optimizer step")
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
    print("| dtype | compared | routing_replay | tokens | mean | 99 % | largest | other choices | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype, result in results.items():
        after = result[STEP]
        rows = {"engine, trainer": {mode: result[mode] for mode in (NONE, ROLLOUT)}}
        rows["before, after a step"] = {mode: after[mode] for mode in (NONE, UPDATE)}
        for compared, mode, row in ((name, mode, row) for name, modes in rows.items() for mode, row in modes.items()):
            print(
                f"| {dtype} | {compared} | {mode} | {row['tokens']:,} | {row['mean']:.2g} | {row['p99']:.2g} | "
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
    optimizer = OptimizerConfig(lr=options.lr)
    config = TrainConfig(
        dtype=dtype,  # type: ignore[arg-type]
        routing_replay=ROLLOUT,
        micro_batch_tokens=options.micro_batch_tokens,
        optimizer=optimizer,
    )
    trainer = TrainEngine(model, config, Layout(), trainable=True)
    sequences = Sequences.of(
        [[*prompt, *response.token_ids] for prompt, response in zip(prompts, responses, strict=True)]
    )
    is_response = torch.cat(
        [
            torch.arange(len(prompt) + len(response.token_ids)) >= len(prompt)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    )
    drawn = torch.cat([torch.tensor(response.logprobs) for response in responses])
    format = RouteFormat.of(trainer.spec.sizes)
    complete = torch.cat([torch.cat([rows, format.empty(1)]) for rows in routes])
    passes = {mode: _pass(trainer, sequences, given) for mode, given in ((NONE, None), (ROLLOUT, complete))}
    for mode, of_mode in passes.items():
        result[mode] = _distances(of_mode, drawn, complete, is_response, format)
    before = passes[NONE]
    result[STEP] = {"lr": options.lr, "gradient_norm": _step(trainer, sequences, before.routes, is_response)}
    for mode, given in ((NONE, None), (UPDATE, before.routes)):
        after = _pass(trainer, sequences, given)
        result[STEP][mode] = _distances(after, before.logprobs[is_response], before.routes, is_response, format)
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


@dataclass(frozen=True)
class _Pass:
    """A pass of the trainer: log-probs and the routers' choices of each token, and its seconds."""

    logprobs: Tensor
    routes: Tensor
    seconds: float


def _pass(trainer: TrainEngine, sequences: Sequences, given: Tensor | None) -> _Pass:
    """Compute the log-probs of sequences, after once that warms up, by given routes or by live routers."""
    routes = None if given is None else TokenRoutes.of(given, sequences.lengths)
    routed = replace(sequences, routes=routes)
    trainer.logprobs(routed)
    platform.synchronize()
    began = time.perf_counter()
    outputs = trainer.logprobs(routed)
    platform.synchronize()
    seconds = time.perf_counter() - began
    recorded = trainer.logprobs(routed, record_routes=True)
    assert outputs is not None and outputs.logprobs is not None and recorded is not None
    assert recorded.routes is not None
    return _Pass(outputs.logprobs.cpu(), recorded.routes, seconds)


def _step(trainer: TrainEngine, sequences: Sequences, routes: Tensor, is_response: Tensor) -> float:
    """Make one optimizer step by given routes, with an advantage of 1 or -1 a sequence; the gradient's norm."""
    draw = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (len(sequences),), generator=draw).mul(2).sub(1).float()
    weights = signs.repeat_interleave(sequences.lengths) * is_response / is_response.sum()

    def loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
        assert outputs.logprobs is not None
        return -(outputs.logprobs * columns["weight"]).sum(), None

    routed = replace(sequences, columns={"weight": weights}, routes=TokenRoutes.of(routes, sequences.lengths))
    result = trainer.update(routed, loss)
    assert result.applied
    return result.grad_norm


def _distances(
    compared: _Pass, logprobs: Tensor, routes: Tensor, is_response: Tensor, format: RouteFormat
) -> dict[str, Any]:
    """Compare the log-probs of response tokens with others, and the experts of all tokens with given routes."""
    differences = (compared.logprobs[is_response].double() - logprobs.double()).abs()
    is_known, layers = (routes != format.missing).all(1), (len(format.layers), format.topk)
    chosen, others = (rows[is_known].unflatten(1, layers).sort(-1).values for rows in (compared.routes, routes))
    return {
        "tokens": len(differences),
        "mean": float(differences.mean()),
        "p99": float(differences.quantile(0.99)),
        "largest": float(differences.max()),
        "different": float((chosen != others).any(-1).double().mean()),
        "seconds": compared.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
