"""A decoding step's attention as SGLang computes it, beside that of `rollout.engine.cascade_attention`.

    python benchmarks/cascade_attention.py [--requests 256] [--samples 8] [--prompt 1024] [--responses 0,512,1024]

computes attention of one layer, of random numbers, for requests of which so many have a prompt in common and are next
to each other, as an engine asks for them; `--apart` puts them as far from each other as there are prompts. The pages of
the cache lie anywhere. Both are captured, as engines capture them, and replayed by turns. Prints the median of each in
microseconds, and of finding out who shares what, which a step does once; last one JSON object. Needs a GPU of compute
capability 8 or 9. What is read should be more than the GPU's own cache holds, as in an engine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.cuda_graphs import captured, replay_us
from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.rollout.scheduler.attention.cascade_attention import attend, requests_of_a_group, share

_REPEATED = 20
"""Calls that are captured together, so that what a replay takes to start does not count."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = Parser(prog="cascade_attention.py", description="Attention with shared pages read once beside SGLang's.")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--apart", action="store_true", help="the samples of a prompt are not next to each other")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--responses", default="0,512,1024", help="tokens of a response so far, with commas")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    try:
        options = parser.parse_args(arguments)
        responses = [int(tokens) for tokens in options.responses.split(",") if tokens.isdecimal()]
        if len(responses) != options.responses.count(",") + 1:
            raise UserError(f"--responses {options.responses}: expected whole numbers, such as 0,512")
        for name in ("requests", "samples", "prompt", "heads", "kv_heads", "head_dim", "rounds"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
        for name, unit in (("heads", "kv_heads"), ("requests", "samples")):
            if getattr(options, name) % getattr(options, unit):
                multiple = f"a multiple of --{unit.replace('_', '-')} {getattr(options, unit)}"
                raise UserError(f"--{name} {getattr(options, name)}: expected {multiple}")
        if not platform.gpus:
            raise UserError("this machine has no GPU, without which there is no FlashAttention-3")
    except UserError as error:
        print(f"cascade_attention.py: {error}", file=sys.stderr)
        return 2
    by_response = {response: _measured(options, response) for response in responses}
    for tokens, times in by_response.items():
        reported = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in times.items())
        print(f"{tokens} tokens: {reported}; {times['sglang'] / times['cascade']:.2f} times", file=sys.stderr)
    command = " ".join(["benchmarks/cascade_attention.py", *sys.argv[1:]])
    device = torch.cuda.get_device_name()
    print(json.dumps({"command": command, "device": device, "us": by_response, "versions": versions()}, indent=2))
    return 0


def _measured(options: Any, response: int) -> dict[str, float]:
    from sglang.jit_kernel.flash_attention import flash_attn_with_kvcache

    device, requests = platform.device(0), options.requests
    private, prompts = response + 1, requests // options.samples
    pages = torch.randperm(prompts * options.prompt + requests * private, device=device).int()
    prompt = pages[: prompts * options.prompt].view(prompts, options.prompt).repeat_interleave(options.samples, 0)
    table = torch.cat([prompt, pages[prompts * options.prompt :].view(requests, private)], dim=1)
    if options.apart:
        table = table.unflatten(0, (prompts, options.samples)).transpose(0, 1).flatten(0, 1).contiguous()
    lengths = torch.full((requests,), table.shape[1], dtype=torch.int32, device=device)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=device)
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device)
    query = draw(requests, options.heads, options.head_dim)
    keys, values = (draw(len(pages), 1, options.kv_heads, options.head_dim) for _ in range(2))
    scale, most = options.head_dim**-0.5, requests_of_a_group(options.heads, options.kv_heads)
    shared = share(table, lengths, 1, most)
    plain = partial(
        flash_attn_with_kvcache,
        q=query,
        k_cache=keys,
        v_cache=values,
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=starts,
        max_seqlen_q=1,
        softmax_scale=scale,
        causal=True,
    )
    cascade = partial(attend, flash_attn_with_kvcache, query, keys, values, shared, softmax_scale=scale)
    torch.testing.assert_close(cascade(), plain(), rtol=2e-2, atol=2e-2)
    calls: dict[str, Callable[[], Any]] = {
        "sglang": plain,
        "cascade": cascade,
        "find": lambda: shared.find(table, lengths),
    }
    graphs = {name: captured(call, _REPEATED) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, graph in graphs.items():
            times[name].append(replay_us(graph) / _REPEATED)
    return {name: statistics.median(rounds) for name, rounds in times.items()}


if __name__ == "__main__":
    sys.exit(main())
