"""GPU time in a trace: kernels by kind, and idle time.

    python benchmarks/kernels.py runs/RUN/profile/step-2-actor.json.gz
    python benchmarks/kernels.py traces/*.trace.json.gz --steps 8

reads traces of torch.profiler, as `trainer.profile` and `rollout.py --trace` write them, prints a table of each and
last one JSON object.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.reshard_plan import Parser
from engine3d.errors import UserError

# Of what a device does, the kinds by the names of kernels; the first that fits. What fits none is element-wise, mostly.
_KINDS = {
    "communication": r"nccl|cross_device_reduce|all_?reduce|all_?gather|reduce_?scatter|multimem|_shot_|barrier_kernel"
    r"|^_collect|^_gather$|^_add_up$|^_add$|^_sum_partials$|^memcpy ptop",
    "products of experts": r"fused_moe_kernel|sum_local_experts|GroupProblemShape|grouped",
    "quantisation": r"quant|block_scaled|cast_transpose|cast_fp8",
    "norms and positions": r"norm|rope|rotary",
    "attention": r"flash|fmha|sdpa|attn|attention|compute_dot_do_o|convert_dq|prepare_varlen",
    "routing": r"moe|topk|permute|expert|router|chunk_sort|radix|argsort|bincount|cumsum|\bscan",
    "other products": r"gemm|matmul|nvjet|cutlass|xmma|cublas|splitk|gemv",
    "log-probs and sampling": r"softmax|sampl|draw_rows|multinomial|argmax|exponential|logprob|log_prob|gumbel|top_?p",
    "optimizer": r"adam",
    "copies": r"^memcpy|^memset|copy",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KINDS.items()}
_OTHER = "element-wise and other"
_ON_A_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LONGEST = 20


@dataclass(frozen=True, slots=True)
class Kernel:
    """One thing that a device did; begin and end in microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Summary:
    """GPU time of a trace, in milliseconds.

    Args:
        span: from the first kernel's begin to the last one's end.
        busy: of it, what at least one kernel ran in.
        communication_alone: of it, what kernels of communication ran in and no others.
        kinds: the sum of each kind's kernels, and how many they are; those of streams beside each other count each.
        longest: the same by name, those that took most.
    """

    span: float
    busy: float
    communication_alone: float
    kinds: dict[str, tuple[float, int]]
    longest: dict[str, tuple[float, int]]

    @property
    def idle(self) -> float:
        """Time in which the device had nothing to do, in milliseconds."""
        return self.span - self.busy


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="kernels.py", description="Time of a GPU's kernels in traces, by kind.")
    parser.add_argument("traces", type=Path, nargs="+", help="of torch.profiler, .json or .json.gz")
    parser.add_argument("--steps", type=int, default=1, help="that a trace is of: times are told for one")
    try:
        options = parser.parse_args(arguments)
        if options.steps < 1:
            raise UserError(f"--steps {options.steps}: expected at least 1")
        summaries = {path: summarise(device_kernels(path)) for path in options.traces}
    except UserError as error:
        print(f"kernels.py: {error}", file=sys.stderr)
        return 2
    for path, summary in summaries.items():
        print(f"{path.name}")
        print("\n".join(lines(summary, options.steps)))
    print(
        json.dumps({path.name: _measurements(summary, options.steps) for path, summary in summaries.items()}, indent=2)
    )
    return 0


def device_kernels(path: Path) -> list[Kernel]:
    """Return the device's kernels of a trace.

    Raises:
        UserError: it cannot be read, or nothing in it is of a GPU.
    """
    try:
        raw = path.read_bytes()
        events = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
        kernels = [
            Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
            for event in events
            if event.get("cat") in _ON_A_DEVICE
        ]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a trace of torch.profiler: {type(error).__name__} {error}") from error
    if not kernels:
        raise UserError(f"{path}: no kernels of a GPU; expected a trace of a run on GPUs")
    return kernels


def kind_of(name: str) -> str:
    """The kind of kernel by its name."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(name)), _OTHER)


def summarise(kernels: Sequence[Kernel]) -> Summary:
    """Times of the kernels of one device."""
    kinds = {name: kind_of(name) for name in {kernel.name for kernel in kernels}}
    busy = _covered(kernels)
    computing = _covered(kernel for kernel in kernels if kinds[kernel.name] != "communication")
    return Summary(
        span=(max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)) / 1000,
        busy=busy / 1000,
        communication_alone=(busy - computing) / 1000,
        kinds=_sums((kinds[kernel.name], kernel) for kernel in kernels),
        longest=dict(list(_sums((kernel.name, kernel) for kernel in kernels).items())[:_LONGEST]),
    )


def _covered(kernels: Iterable[Kernel]) -> float:
    """Time in which at least one of them runs."""
    covered, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin):
        covered += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return covered


def _sums(named: Iterable[tuple[str, Kernel]]) -> dict[str, tuple[float, int]]:
    """Milliseconds and number, longest first."""
    times: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for name, kernel in named:
        times[name] += (kernel.end - kernel.begin) / 1000
        counts[name] += 1
    return {name: (times[name], counts[name]) for name in sorted(times, key=lambda name: -times[name])}


def lines(summary: Summary, steps: int) -> list[str]:
    """A line for each kind."""
    rows = [(kind, milliseconds, f"{count / steps:10.0f}") for kind, (milliseconds, count) in summary.kinds.items()]
    rows += [
        ("nothing", summary.idle, ""),
        ("(communication alone)", summary.communication_alone, ""),
        ("all", summary.span, ""),
    ]
    return [
        f"  {name:<24}{milliseconds / steps:10.3f} ms{milliseconds / summary.span:8.1%}{count}"
        for name, milliseconds, count in rows
    ]


def _measurements(summary: Summary, steps: int) -> dict[str, Any]:
    def table(sums: dict[str, tuple[float, int]]) -> dict[str, Any]:
        return {name[:200]: {"ms": total / steps, "kernels": count / steps} for name, (total, count) in sums.items()}

    return {
        "steps": steps,
        "step_ms": summary.span / steps,
        "busy_ms": summary.busy / steps,
        "idle_ms": summary.idle / steps,
        "communication_alone_ms": summary.communication_alone / steps,
        "kinds": table(summary.kinds),
        "longest": table(summary.longest),
    }


if __name__ == "__main__":
    sys.exit(main())
