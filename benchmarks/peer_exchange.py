"""Exchanges of tokens between GPUs by `rollout.engine.peer_collectives`, beside NCCL, as a step of decoding makes them.

    torchrun --nproc-per-node 4 benchmarks/peer_exchange.py > exchange.json

A layer of experts gathers every rank's tokens and sums what the ranks made of them. Both are recorded in a CUDA graph,
for as many layers as a model has, and all ranks run it at once. Printed is one JSON object: of each number of tokens
the microseconds of a layer on the slowest rank, each rank's the median over runs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from benchmarks.cuda_graphs import captured, replay_us
from benchmarks.reshard_plan import Parser, versions
from engine3d.errors import UserError
from engine3d.platform import platform
from engine3d.platform.peer_memory import PeerExchange
from engine3d.rollout.scheduler.peer_collectives import PEER_BYTES

_TIMEOUT_S = 60.0
_ELEMENT_BYTES = 2


def main(arguments: list[str] | None = None) -> int:
    """Measure on this rank; the exit code. The first one prints."""
    parser = Parser(prog="peer_exchange.py", description="Exchanges of a decoding step's tokens, beside NCCL.")
    parser.add_argument("--tokens", default="64,128,256", help="of a rank in a step, with commas")
    parser.add_argument("--hidden", type=int, default=2048, help="bfloat16 values of a token")
    parser.add_argument("--layers", type=int, default=48, help="of a step")
    parser.add_argument("--rounds", type=int, default=20)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        options = parser.parse_args(arguments)
        sizes = [int(size) for size in options.tokens.split(",") if size.isdecimal() and int(size)]
        if len(sizes) != options.tokens.count(",") + 1:
            raise UserError(f"--tokens {options.tokens}: expected whole numbers, such as 64,256")
        for name in ("hidden", "layers", "rounds"):
            if getattr(options, name) < 1:
                raise UserError(f"--{name} {getattr(options, name)}: expected at least 1")
        if (nbytes := max(sizes) * ranks * options.hidden * _ELEMENT_BYTES) > PEER_BYTES:
            raise UserError(f"--tokens {max(sizes)}: {nbytes} bytes of all ranks, of which {PEER_BYTES} go by kernels")
        if platform.gpus < 2:
            raise UserError(f"this machine has {platform.gpus} GPUs; expected two at least")
        if ranks < 2:
            raise UserError("one rank has nobody to exchange with; start it with torchrun --nproc-per-node 2")
    except UserError as error:
        print(f"peer_exchange.py: {error}", file=sys.stderr)
        return 2
    device = platform.device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(platform.collective_backend)
    assert dist.group.WORLD is not None
    exchange = platform.peer_exchange(dist.group.WORLD, PEER_BYTES, _TIMEOUT_S)
    by_tokens = {}
    for tokens in sizes:
        by_tokens[tokens] = times = _measured(exchange, tokens, options, device)
        if not dist.get_rank():
            reported = ", ".join(f"{name} {microseconds:.1f} us" for name, microseconds in times.items())
            print(f"{tokens} tokens: {reported}; {times['nccl'] / times['kernels']:.2f} times", file=sys.stderr)
    if not dist.get_rank():
        command = " ".join(["benchmarks/peer_exchange.py", *sys.argv[1:]])
        conditions = {"command": command, "device": torch.cuda.get_device_name(), "ranks": ranks, "us": by_tokens}
        print(json.dumps(conditions | {"versions": versions()}, indent=2))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _measured(exchange: PeerExchange, tokens: int, options: Any, device: torch.device) -> dict[str, float]:
    ranks, mine = exchange.ranks, exchange.rank
    generator = torch.Generator().manual_seed(tokens)
    drawn = torch.randn(ranks, 1 + ranks, tokens, options.hidden, generator=generator).to(device, torch.bfloat16)
    local, shards = drawn[mine, 0], drawn[mine, 1:]
    gathered, total = torch.empty_like(shards), torch.empty_like(local)

    def nccl() -> None:
        dist.all_gather_into_tensor(gathered.flatten(0, 1), local)
        dist.reduce_scatter_tensor(total, shards.flatten(0, 1))

    def kernels() -> None:
        exchange.all_gather(local, gathered)
        exchange.reduce_scatter(shards, total)

    medians = {}
    for layer in (nccl, kernels):
        gathered.zero_()
        total.zero_()
        medians[layer.__name__] = _layer_us(layer, options.layers, options.rounds)
        assert torch.equal(gathered, drawn[:, 0])
        torch.testing.assert_close(total.float(), drawn[:, 1 + mine].float().sum(0), rtol=2e-2, atol=5e-2)
    return medians


def _layer_us(layer: Callable[[], None], layers: int, rounds: int) -> float:
    """Measure the microseconds of a layer on the slowest rank."""
    graph, times = captured(layer, layers), []
    for _ in range(rounds):
        dist.barrier()
        times.append(replay_us(graph) / layers)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    sys.exit(main())
