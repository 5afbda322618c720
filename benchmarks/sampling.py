"""SGLang's sampler beside the one of `rollout.engine.fused_sampling`, on logits of random numbers.

    python benchmarks/sampling.py [--requests 32,256,1024] [--vocabulary 151936] [--rounds 20]

draws a token for each request, with its log-prob, by turns with each sampler, at temperature 1 and no top_k, top_p or
min_p, as rollouts do. Prints the median of each in milliseconds and, on a GPU, how much memory it takes beside the
logits, in multiples of them; last one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.platform import platform


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = Parser(prog="sampling.py", description="A sampler of our own beside SGLang's.")
    parser.add_argument("--requests", default="32,256,1024", help="numbers of rows of logits, with commas")
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=20)
    try:
        options = parser.parse_args(arguments)
        rows = [int(count) for count in options.requests.split(",") if count.isdecimal() and int(count)]
        if len(rows) != options.requests.count(",") + 1:
            raise UserError(f"--requests {options.requests}: expected whole numbers of at least 1, such as 32,256")
        for name in ("vocabulary", "rounds"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name} {getattr(options, name)}: expected at least 1")
    except UserError as error:
        print(f"sampling.py: {error}", file=sys.stderr)
        return 2
    # As engines have it.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    with tempfile.TemporaryDirectory() as scratch:
        samplers = _samplers(Path(scratch))
        try:
            by_count = {count: _measured(samplers, count, options.vocabulary, options.rounds) for count in rows}
        finally:
            _leave()
    for count, by_sampler in by_count.items():
        reported = ", ".join(
            f"{name} {measurement['ms']:.3f} ms{_memory(measurement)}" for name, measurement in by_sampler.items()
        )
        print(
            f"{count} requests: {reported}; {by_sampler['sglang']['ms'] / by_sampler['fused']['ms']:.2f} times",
            file=sys.stderr,
        )
    device = torch.cuda.get_device_name() if platform.gpus else "cpu"
    command = " ".join(["benchmarks/sampling.py", *sys.argv[1:]])
    print(json.dumps({"command": command, "device": device, "requests": by_count, "versions": versions()}, indent=2))
    return 0


def _memory(measurement: dict[str, float]) -> str:
    return f" and {measurement['beside_the_logits']:.2f} of the logits" if "beside_the_logits" in measurement else ""


def _samplers(scratch: Path) -> dict[str, Any]:
    """Both, in a process that is the only rank of an engine."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import ServerArgs

    from engine3d.rollout.scheduler.fused_sampler import FusedSampler

    device = platform.device(0)
    arguments = ServerArgs(model_path="dummy", device=device.type)
    arguments.sampling_backend = "flashinfer" if platform.gpus else "pytorch"
    get_context().set_server_args(arguments)
    parallel_state.init_distributed_environment(
        backend=platform.collective_backend,
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{scratch / 'meeting'}",
    )
    parallel_state.initialize_model_parallel()
    model = type("ModelConfig", (), {"hf_config": None, "hidden_size": 8, "dtype": torch.bfloat16})
    initialize_dp_attention(arguments, model)  # type: ignore[arg-type]
    return {"sglang": Sampler(), "fused": FusedSampler()}


def _leave() -> None:
    """End what ranks share: NCCL's threads would keep the process from ending."""
    from sglang.srt.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


def _measured(samplers: dict[str, Any], requests: int, vocabulary: int, rounds: int) -> dict[str, dict[str, float]]:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    device = platform.device(0)
    drawn = torch.randn(requests, vocabulary, device=device)
    info = SamplingBatchInfo(
        temperatures=torch.ones(requests, 1, device=device),
        top_ps=torch.ones(requests, device=device),
        top_ks=torch.full((requests,), 1 << 30, dtype=torch.int32, device=device),
        min_ps=torch.zeros(requests, device=device),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=vocabulary,
        device=device.type,
    )
    positions = torch.zeros(requests, dtype=torch.int64, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in samplers}
    peaks = dict.fromkeys(samplers, 0)
    logprobs: dict[str, torch.Tensor] = {}
    for number in range(rounds + 3):
        for name, sampler in samplers.items():
            output = LogitsProcessorOutput(next_token_logits=drawn.clone())

            def draw(sampler: Any = sampler, output: Any = output) -> torch.Tensor:
                tokens: torch.Tensor = sampler(output, info, True, [0] * requests, [None] * requests, positions)
                return tokens

            tokens, took, peak = _timed(draw)
            logprobs[name] = drawn.log_softmax(dim=-1).gather(1, tokens.long()[:, None])[:, 0]
            torch.testing.assert_close(output.next_token_logprobs, logprobs[name], atol=1e-4, rtol=1e-4)
            if number >= 3:
                seconds[name].append(took)
            peaks[name] = max(peaks[name], peak)
    return {
        name: {
            "ms": 1e3 * statistics.median(seconds[name]),
            "mean_logprob": float(logprobs[name].mean()),
        }
        | ({"beside_the_logits": peaks[name] / drawn.nbytes} if platform.gpus else {})
        for name in samplers
    }


def _timed(draw: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, int]:
    """Return the result of `draw`, its seconds, and its peak of device memory in bytes, 0 on a CPU."""
    if platform.gpus:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    platform.synchronize()
    began = time.perf_counter()
    tokens = draw()
    platform.synchronize()
    took = time.perf_counter() - began
    return tokens, took, torch.cuda.max_memory_allocated() - before if platform.gpus else 0


if __name__ == "__main__":
    sys.exit(main())
