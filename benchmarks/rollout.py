"""Generation speed of engines.

    python benchmarks/rollout.py --model qwen3-30b-a3b --rollout tp=4,ep=4,engines=1

lets engines with random weights respond to random prompts, as this project's rollout role does, and then SGLang alone,
started with the same arguments and given the same requests; prints one JSON object. With `hosts=2` each of our engines
is in two processes, as on two hosts; SGLang's are in one. Where all requests of an engine are decoded at once, the mean
step is compared with its bound (`roofline.py`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parted_engine import PartedEngine
from benchmarks.reshard_plan import Parser, Rollout, named_model, parse_rollout, versions
from benchmarks.roofline import decode_bytes, memory_bandwidth
from engine3d.errors import UserError
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.rollout import Request, RolloutEngine, launch
from engine3d.rollout.cache import PAGE_TOKENS, tokens_needed
from engine3d.rollout.config import RolloutConfig, SamplingConfig

_LIMIT_S = 1800.0
_TRACE_STEPS = 8


@dataclass(frozen=True)
class Case:
    """Model, engines and load of a measurement.

    Args:
        model: directory with a config.json.
        rollout: sizes of the engines.
        config: of each engine.
        prompts: token ids of each request, engine by engine.
        output: tokens of each response.
        rounds: how often all requests are made, after once that warms up.
        samples: requests that have a prompt in common, one after another.
        trace: a directory for traces of so many steps of the first engine, in one round more; None for none.
    """

    model: Path
    rollout: Rollout
    config: RolloutConfig
    prompts: list[list[list[int]]]
    output: int
    rounds: int
    samples: int = 1
    trace: tuple[Path, int] | None = None

    @property
    def of_an_engine(self) -> int:
        """Requests of each engine."""
        return len(self.prompts[0])

    @property
    def input(self) -> int:
        """Tokens of a prompt."""
        return len(self.prompts[0][0])

    def devices(self, engine: int) -> tuple[int, ...]:
        """Devices of an engine; none if there are no GPUs."""
        ranks = range(engine * self.rollout.tp, (engine + 1) * self.rollout.tp)
        return tuple(ranks) if platform.gpus else ()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="rollout.py", description="Rollout throughput, beside that of SGLang alone.")
    parser.add_argument("--model", required=True, help="a name in benchmarks/models, or a directory with a config.json")
    parser.add_argument("--layers", type=int, help="of the model, where not all of them are wanted")
    parser.add_argument("--rollout", default="tp=1", help="sizes of the engines, such as tp=4,ep=4,engines=1")
    parser.add_argument("--attention-dp", type=int, default=1, help="rollout.engine.attention_dp, of SGLang alone too")
    parser.add_argument("--requests", type=int, default=512, help="of all engines together")
    parser.add_argument("--samples", type=int, default=1, help="requests that have a prompt in common")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens of each response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--precision", choices=("fp8",), help="rollout.engine.precision, of SGLang alone too")
    parser.add_argument("--kv-cache-dtype", help="rollout.engine.kv_cache_dtype, of SGLang alone too")
    parser.add_argument("--mem-fraction", type=float, default=0.8)
    parser.add_argument("--peer-collectives", action="store_true", help="as rollout.engine has it, of our engines")
    parser.add_argument("--cascade-attention", action="store_true", help="as rollout.engine has it, of our engines")
    parser.add_argument("--local-experts-only", action="store_true", help="as rollout.engine has it, of our engines")
    parser.add_argument("--fused-sampling", action="store_true", help="rollout.engine.fused_sampling, of our engines")
    parser.add_argument("--engines-alone", action="store_true", help="leave out SGLang alone")
    parser.add_argument("--running", type=int, default=512, help="most requests that an engine runs at once")
    parser.add_argument(
        "--trace", type=Path, metavar="DIRECTORY", help="for traces of the first engine's steps (`kernels.py`)"
    )
    parser.add_argument("--trace-steps", type=int, help="of a last round, in its middle; 8 if not given")
    try:
        options = parser.parse_args(arguments)
        rollout, spec = parse_rollout(options.rollout), named_model(options.model)
        if platform.gpus and platform.gpus < rollout.ranks:
            raise UserError(
                f"--rollout {options.rollout}: needs {rollout.ranks} GPUs, this machine has {platform.gpus}"
            )
        if options.trace_steps is not None and options.trace is None:
            raise UserError("--trace-steps: expected with --trace DIRECTORY, where the trace is to be")
        if options.trace_steps is not None and options.trace_steps < 1:
            raise UserError(f"--trace-steps {options.trace_steps}: expected at least 1")
        if options.requests % rollout.engines:
            raise UserError(f"--requests {options.requests}: expected a multiple of the {rollout.engines} engines")
        requests = options.requests // rollout.engines
        if options.samples < 1 or requests % options.samples:
            raise UserError(f"--samples {options.samples}: expected a divisor of the {requests} requests of an engine")
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(options.model)
            if _has_weights(directory):
                if options.layers:
                    raise UserError(f"--layers: {directory} has weights of all of its layers; expected no --layers")
            else:
                directory = Path(scratch)
                layers = {"num_hidden_layers": options.layers} if options.layers else {}
                (directory / "config.json").write_text(json.dumps(dict(spec.hf_config) | layers))
            stats = _measure(_case(options, rollout, directory, spec.vocab_size), with_sglang=not options.engines_alone)
    except UserError as error:
        print(f"rollout.py: {error}", file=sys.stderr)
        return 2
    command = " ".join(["benchmarks/rollout.py", *sys.argv[1:]])
    print(json.dumps({"command": command} | stats | {"versions": versions()}, indent=2))
    return 0


def _has_weights(model: Path) -> bool:
    return any(model.glob("*.safetensors"))


def _case(options: argparse.Namespace, rollout: Rollout, model: Path, vocabulary: int) -> Case:
    draw = random.Random(0)

    def prompts_of_an_engine() -> list[list[int]]:
        count = options.requests // rollout.engines // options.samples
        drawn = [[draw.randrange(vocabulary) for _ in range(options.input)] for _ in range(count)]
        return [prompt for prompt in drawn for _ in range(options.samples)]

    config = RolloutConfig(
        tp=rollout.tp,
        ep=rollout.ep,
        attention_dp=options.attention_dp,
        dtype=options.dtype,
        precision=options.precision,
        kv_cache_dtype=options.kv_cache_dtype,
        context_length=options.input + options.output,
        mem_fraction_static=options.mem_fraction,
        max_running_requests=options.running,
        fused_sampling=options.fused_sampling,
        peer_collectives=options.peer_collectives,
        cascade_attention=options.cascade_attention,
        local_experts_only=options.local_experts_only,
        request_timeout_s=_LIMIT_S,
        server_args={} if _has_weights(model) and options.precision is None else {"load_format": "dummy"},
    )
    prompts = [prompts_of_an_engine() for _ in range(rollout.engines)]
    trace = (options.trace, options.trace_steps or _TRACE_STEPS) if options.trace else None
    return Case(model, rollout, config, prompts, options.output, options.rounds, options.samples, trace)


@dataclass(frozen=True)
class Measured:
    """Engines of a kind.

    Args:
        start_s: seconds until all could generate.
        rounds_s: seconds of each round.
        cache_tokens: that the KV cache of each has room for; None where it was not asked.
    """

    start_s: float
    rounds_s: list[float]
    cache_tokens: int | None = None


def _measure(case: Case, *, with_sglang: bool) -> dict[str, Any]:
    by_system = {"engine": _engines(case)} | ({"sglang": _sglang(case)} if with_sglang else {})
    requests = sum(map(len, case.prompts))
    stats: dict[str, Any] = {"device": _device(), "requests": requests, "input": case.input, "output": case.output}
    for way, measured in by_system.items():
        median = statistics.median(measured.rounds_s)
        stats[way] = {
            "start_s": measured.start_s,
            "round_s": measured.rounds_s,
            "output_tokens_per_s": requests * case.output / median,
            "output_tokens_per_s_per_device": requests * case.output / median / case.rollout.ranks,
        }
    medians = {way: statistics.median(measured.rounds_s) for way, measured in by_system.items()}
    if with_sglang:
        stats["engine_over_sglang"] = medians["sglang"] / medians["engine"]
    cache_tokens = by_system["engine"].cache_tokens
    if decoded_at_once(case, cache_tokens or 0):
        stats["decode"] = decode_figures(case, memory_bandwidth(), medians)
    else:
        print(
            f"decode: not all {case.of_an_engine} requests of an engine run at once, with room for "
            f"{case.config.max_running_requests} and {cache_tokens} tokens; no bound is told",
            file=sys.stderr,
        )
    return stats


def decoded_at_once(case: Case, cache_tokens: int) -> bool:
    """True if an engine has capacity for all of its requests, so that a step decodes a token of each."""
    needed = tokens_needed(
        requests=case.of_an_engine,
        sequence_tokens=case.input + case.output,
        page_tokens=PAGE_TOKENS[platform.device_type],
    )
    return case.of_an_engine <= case.config.max_running_requests and needed <= cache_tokens


def decode_figures(case: Case, bandwidth: float, rounds_s: dict[str, float]) -> dict[str, Any]:
    """The mean step of a round beside the least it could take. A round is all steps: prompts are in the cache.

    What requests have in common is read once, in the least.

    Args:
        case: whose requests are decoded at once.
        bandwidth: of a device's memory, in bytes a second.
        rounds_s: seconds of a round, by way.
    """
    spec = load_model_spec(case.model)
    read = decode_bytes(
        spec,
        case.rollout,
        case.config,
        requests=case.of_an_engine,
        samples=case.samples,
        prompt=case.input,
        response=case.output,
    )
    least = read.step / bandwidth
    stats: dict[str, Any] = {
        "bandwidth_gb_s": bandwidth / 1e9,
        "weights_bytes": read.weights,
        "cache_bytes": read.cache,
        "least_step_ms": 1e3 * least,
    }
    for way, seconds in rounds_s.items():
        step = seconds / case.output
        stats[way] = {"step_ms": 1e3 * step, "of_roofline": least / step}
    return stats


def _engines(case: Case) -> Measured:
    """The rollout role's engines."""
    sampling = SamplingConfig(max_new_tokens=case.output, ignore_eos=True)
    with ExitStack() as stack, ThreadPoolExecutor(case.rollout.engines + 1) as threads:
        parted = [
            PartedEngine(case.model, case.config, case.rollout.hosts, case.devices(number))
            for number in range(case.rollout.engines)
        ]
        for parted_engine in parted:
            stack.callback(parted_engine.shutdown)
        started = time.perf_counter()
        engines = list(threads.map(PartedEngine.start, parted))
        start_s = time.perf_counter() - started

        def run() -> None:
            making = [
                threads.submit(_respond, engine, prompts, sampling)
                for engine, prompts in zip(engines, case.prompts, strict=True)
            ]
            for future in making:
                _check(case, future.result())

        seconds = _rounds("engine", case.rounds, run)
        if case.trace is not None:
            traced = threads.submit(_trace, engines[0], *case.trace, statistics.median(seconds) / 2)
            run()
            traced.result()
        return Measured(start_s, seconds, min(engine.stats.cache_tokens for engine in engines))


def _respond(engine: RolloutEngine, prompts: Sequence[list[int]], sampling: SamplingConfig) -> list[int]:
    """Tokens of each response."""
    requests = [Request(index, prompt, sampling, index) for index, prompt in enumerate(prompts)]
    engine.submit(requests, together=True)
    return [len(response.token_ids) for response in engine.wait_for(range(len(requests)))]


def _trace(engine: RolloutEngine, directory: Path, steps: int, after_s: float) -> None:
    time.sleep(after_s)
    engine.trace(directory, steps)


def _sglang(case: Case) -> Measured:
    """SGLang's own engines, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    started = time.perf_counter()
    for number in range(case.rollout.engines):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, case, number)))
        processes[-1].start()
        pipes.append(ours)
    for pipe in pipes:
        _answer(pipe)
    start_s = time.perf_counter() - started

    def run() -> None:
        for pipe in pipes:
            pipe.send(True)
        for pipe in pipes:
            _check(case, _answer(pipe))

    seconds = _rounds("sglang", case.rounds, run)
    for pipe in pipes:
        pipe.send(False)
    for process in processes:  # whose memory is free then
        process.join(_LIMIT_S)
    return Measured(start_s, seconds)


def _serve(pipe: Any, case: Case, number: int) -> None:
    """One of SGLang's engines: responds to all its prompts as often as it is told to."""
    model = launch.read_model(case.model, weights_needed=False)
    os.environ.update(launch.environment(case.config, model, case.devices(number)))
    import sglang

    engine = sglang.Engine(**launch.server_arguments(case.config, model))
    pipe.send([])
    parameters = {"max_new_tokens": case.output, "ignore_eos": True, "temperature": 1.0}
    while pipe.recv():
        outputs = engine.generate(
            input_ids=case.prompts[number], sampling_params=parameters, return_logprob=True, stream=False
        )
        pipe.send([output["meta_info"]["completion_tokens"] for output in outputs])
    engine.shutdown()


def _answer(pipe: Any) -> list[int]:
    if not pipe.poll(_LIMIT_S):
        raise SystemExit(f"rollout.py: SGLang did not answer within {_LIMIT_S:.0f} s")
    try:
        answer: list[int] = pipe.recv()
    except EOFError:
        raise SystemExit("rollout.py: SGLang's process has ended; what it printed is above") from None
    return answer


def _rounds(way: str, count: int, run: Callable[[], None]) -> list[float]:
    seconds = []
    for number in range(count + 1):
        started = time.perf_counter()
        run()
        took = time.perf_counter() - started
        if number:
            seconds.append(took)
        line = f"{way} {took:.2f} s{'' if number else ' (warms up)'}"
        print(f"[{time.strftime('%H:%M:%S')}] {line}", file=sys.stderr, flush=True)
    return seconds


def _check(case: Case, lengths: Sequence[int]) -> None:
    assert set(lengths) == {case.output}, f"responses of {sorted(set(lengths))} tokens, expected {case.output}"


def _device() -> str:
    if not platform.gpus:
        return "CPU"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
