"""Log-probs of several tokens in the place of each: the same on every layout, packed or padded, and differentiable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engine3d.layout import Layout
from engine3d.training.config import LayoutConfig, OptimizerConfig, TrainConfig
from engine3d.training.passes.sequences import CHOSEN, Sequences
from tests.support import tiny_families
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.processes

RUNS: dict[int, list[tuple[dict[str, Any], bool]]] = {
    1: [({}, True), ({}, False)],
    2: [({"tp": 2}, True), ({"pp": 2}, False), ({}, True)],
}
"""Layouts, each with True for packed rows or False for padded ones."""
FURTHER_RUNS: dict[int, list[tuple[dict[str, Any], bool]]] = {2: [({"tp": 2}, False), ({"pp": 2}, True), ({}, False)]}
TOP, TEMPERATURE = 4, 0.8


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 14, (7,), generator=generator).tolist()
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def _sequences(mine: list[int]) -> Sequences:
    """Some of the samples, with chosen tokens and a weight for each of these, which are those of the whole."""
    samples, generator = _samples(), torch.Generator().manual_seed(1)
    count = sum(map(len, samples))
    # In the place of each token: different tokens, of any part of the vocabulary.
    chosen = torch.randn(count, 60, generator=generator).argsort(dim=1)[:, :TOP]
    weights = torch.randn(count, TOP, generator=generator)
    split = [list(column.split([len(sample) for sample in samples])) for column in (chosen, weights)]
    columns = [torch.cat([by_sample[index] for index in mine]) for by_sample in split]
    return Sequences.of([samples[index] for index in mine], **{CHOSEN: columns[0], "weights": columns[1]})


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = (outputs.chosen_logprobs.exp() * columns["weights"]).sum() + 0.1 * outputs.logprobs.sum()
    return loss, loss.detach()


def _outputs(directory: Path, world_size: int, runs: list[tuple[dict[str, Any], bool]]) -> list[dict[str, Any]]:
    return [_of_layout(directory, sizes, world_size, packing) for sizes, packing in runs]


def _of_layout(directory: Path, sizes: dict[str, Any], world_size: int, packing: bool) -> dict[str, Any]:
    from engine3d.training.engine import TrainEngine

    config = TrainConfig(
        layout=LayoutConfig(**sizes),
        dtype="float32",
        micro_batch_tokens=30,
        packing=packing,
        optimizer=OptimizerConfig(clip_grad=0.0),
    )
    engine = TrainEngine(directory, config, Layout.of_world(world_size, **sizes), seed=1)
    mine = list(range(engine.coordinates.dp, len(_samples()), engine.layout.dp))
    sequences = _sequences(mine)
    plain = Sequences(sequences.tokens, sequences.lengths)
    both = engine.logprobs(sequences, temperature=TEMPERATURE, top=2)
    top = engine.logprobs(plain, temperature=TEMPERATURE, top=TOP)
    alone = engine.logprobs(plain, temperature=TEMPERATURE)
    result = engine.update(sequences, _loss, temperature=TEMPERATURE)
    loss = torch.stack([torch.zeros((), device=engine.device), *result.loss_outputs]).sum()
    dist.all_reduce(loss)
    engine.close()
    return {
        "mine": mine,
        "both": both,
        "top": top,
        "alone": alone,
        "loss": float(loss) / engine.layout.tp,
        "norm": result.grad_norm,
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "moe"
    tiny_families.make("qwen3_moe", directory)
    return directory


@pytest.mark.parametrize(
    ("world_size", "runs"),
    [*RUNS.items(), *(pytest.param(*further, marks=pytest.mark.release) for further in FURTHER_RUNS.items())],
)
def test_every_layout_agrees_with_log_softmax_over_the_whole_vocabulary(
    directory: Path, world_size: int, runs: list[tuple[dict[str, Any], bool]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    samples, every = _samples(), _sequences(list(range(len(_samples()))))
    offsets, dense, loss = every.offsets(), [], torch.zeros((), dtype=torch.float64)
    for index, sample in enumerate(samples):
        logits = model(torch.tensor([sample])).logits[0, :-1].double() / TEMPERATURE
        dense.append(logits.log_softmax(dim=-1))
        after = slice(offsets[index] + 1, offsets[index + 1])
        chosen = dense[-1].gather(1, every.columns[CHOSEN][after])
        of_tokens = dense[-1].gather(1, torch.tensor(sample[1:])[:, None])
        loss = loss + (chosen.exp() * every.columns["weights"][after]).sum() + 0.1 * of_tokens.sum()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()

    results = run_distributed(_outputs, world_size, directory, world_size, runs, timeout_s=300)
    for ranks in zip(*results, strict=True):
        seen = set()
        for rank in ranks:
            # The loss takes in the first tokens, which have no log-probs: 0, and a probability of 1.
            first = sum(every.columns["weights"][offset].sum() for offset in offsets[:-1])
            assert rank["loss"] == pytest.approx(float(loss) + float(first), rel=1e-4)
            assert rank["norm"] == pytest.approx(float(norm), rel=1e-3)
            if rank["both"] is None:
                continue
            sizes = [len(samples[index]) for index in rank["mine"]]
            for name, outputs in (("both", rank["both"]), ("top", rank["top"])):
                torch.testing.assert_close(outputs.logprobs, rank["alone"].logprobs, atol=0, rtol=0)
                samples_of_rank = zip(
                    rank["mine"], outputs.top_tokens.split(sizes), outputs.chosen_logprobs.split(sizes), strict=True
                )
                for index, top, logprobs in samples_of_rank:
                    seen.add(index)
                    assert not logprobs[0].any() and not top[0].any()  # nothing came before a first token
                    best = dense[index].topk(top.shape[1], dim=1)
                    torch.testing.assert_close(dense[index].gather(1, top[1:]), best.values, atol=2e-5, rtol=1e-4)
                    requested = top[1:]
                    if name == "both":
                        requested = every.columns[CHOSEN][offsets[index] + 1 : offsets[index + 1]]
                    expected = dense[index].detach().gather(1, requested).float()
                    torch.testing.assert_close(logprobs[1:], expected, atol=3e-5, rtol=1e-4)
            assert rank["alone"].top_tokens is None and rank["alone"].chosen_logprobs is None
        assert seen == set(range(len(samples)))
