"""Log-probs from hidden states in chunks, against those of whole logits, with the gradients of states and weights."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine3d.layout import Layout
from engine3d.memory import inference_peak, update_peak
from engine3d.models import load_model_spec
from engine3d.platform import platform
from engine3d.training.config import LayoutConfig, TrainConfig
from engine3d.training.passes import forward
from engine3d.training.passes.logit_chunks import logprobs_of_states
from engine3d.training.passes.sequences import CHOSEN
from engine3d.training.passes.vocab_parallel import logprobs_of_choices, top_tokens
from tests.engine3d.training.test_engine import SETTINGS, _local_samples, _loss, _samples
from tests.support import tiny_families
from tests.support.distributed import run_distributed

pytestmark = pytest.mark.processes

TOKENS, HIDDEN, VOCABULARY, PADDED, CHOICES = 7, 5, 10, 12, 3


def _inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    states, weight = torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    choices = torch.rand(TOKENS, VOCABULARY, generator=generator).argsort(dim=1)[:, :CHOICES]
    return states, 2 * weight, targets, choices, torch.rand(TOKENS, 2 + CHOICES, generator=generator)


def _loss_of(outputs: Any, slopes: torch.Tensor, *, with_entropy: bool) -> torch.Tensor:
    logprobs, entropy, chosen = outputs[:3]
    loss = (logprobs * slopes[:, 0]).sum()
    if with_entropy:
        loss = loss + (entropy * slopes[:, 1]).sum()
    return loss if chosen is None else loss + (chosen * slopes[:, 2:]).sum()


def _on_a_rank(world_size: int) -> None:
    dist.init_process_group("gloo")
    states, weight, targets, choices, slopes = _inputs()
    rank, width = int(os.environ["RANK"]), PADDED // world_size
    rows = weight[rank * width : (rank + 1) * width]
    over: dict[str, Any] = {"vocabulary": VOCABULARY, "group": dist.group.WORLD}
    best = top_tokens(states @ rows.t(), CHOICES, **over)
    several = itertools.product((1, 3, TOKENS, 100), (False, True), (None, "choices", "top"))
    # Temperatures change with each case, and so meet all values of the other three.
    for (chunk, with_entropy, top), temperature in zip(
        several, itertools.cycle((1.0, 0.7, 0.7, 1.0, 0.7)), strict=False
    ):
        whole_states, whole_rows = states.clone().requires_grad_(), rows.clone().requires_grad_()
        over |= {"temperature": temperature, "with_entropy": with_entropy}
        columns = {None: choices[:, :0], "choices": choices, "top": best}[top]
        expected = logprobs_of_choices(whole_states @ whole_rows.t(), targets, columns, **over)
        _loss_of(expected if top else (*expected[:2], None), slopes, with_entropy=with_entropy).backward()
        for main in (False, True):
            own_states, own_rows = states.clone().requires_grad_(), rows.clone().requires_grad_()
            if main:
                own_rows.main_grad = torch.ones_like(rows)  # type: ignore[attr-defined]
            outputs = logprobs_of_states(
                own_states,
                own_rows,
                targets,
                choices if top == "choices" else None,
                chunk=chunk,
                top=CHOICES if top == "top" else 0,
                **over,
            )
            _loss_of(outputs, slopes, with_entropy=with_entropy).backward()
            for one, other in zip(outputs[:2], expected[:2], strict=True):
                torch.testing.assert_close(one, other)
            if top is not None:
                torch.testing.assert_close(outputs[2], expected[2])
            assert (outputs[2] is None) == (top is None)
            assert (outputs[3] is None) == (top != "top") and (outputs[3] is None or torch.equal(outputs[3], best))
            torch.testing.assert_close(own_states.grad, whole_states.grad)
            gradient = own_rows.main_grad - 1 if main else own_rows.grad  # type: ignore[attr-defined]
            assert (own_rows.grad is None) == main
            torch.testing.assert_close(gradient, whole_rows.grad, atol=1e-5, rtol=1e-4)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_and_gradients_are_those_of_whole_logits(world_size: int) -> None:
    run_distributed(_on_a_rank, world_size, world_size, timeout_s=300)


@pytest.mark.gpu
@pytest.mark.skipif(platform.gpus == 0, reason="needs a GPU")
@pytest.mark.parametrize("accumulated", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_the_gradient_takes_no_room_of_its_own(accumulated: torch.dtype) -> None:
    run_distributed(_on_a_gpu, 1, accumulated, timeout_s=300)


def _on_a_gpu(accumulated: torch.dtype) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    tokens, hidden, vocabulary, chunk = 4096, 512, 65536, 256
    over: dict[str, Any] = {"vocabulary": vocabulary, "group": dist.group.WORLD}
    states = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    weight = 0.05 * torch.randn(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    exact_states, exact_weight = states.float().requires_grad_(), weight.float().requires_grad_()
    exact = logprobs_of_choices(exact_states @ exact_weight.t(), targets, targets[:, None][:, :0], **over)
    (exact[0].sum() / tokens).backward()
    assert exact_weight.grad is not None
    del exact
    states.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=accumulated)  # type: ignore[attr-defined]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = logprobs_of_states(states, weight, targets, chunk=chunk, **over)
    (outputs[0].sum() / tokens).backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 2 * chunk * vocabulary * 2 + 8 * tokens * hidden < weight.nbytes + chunk * vocabulary * 2
    torch.testing.assert_close(states.grad.float(), exact_states.grad, atol=2e-6, rtol=0.03)  # type: ignore[union-attr]
    gradient = weight.main_grad.float()  # type: ignore[attr-defined]
    off = (gradient - exact_weight.grad).norm() / exact_weight.grad.norm()
    assert off < (0.003 if accumulated is torch.float32 else 0.01), off
    dist.destroy_process_group()


# The embedding of the second is its output layer too.
@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3-tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / request.param
    tiny_families.make(request.param, directory)
    return directory


def _trained(directory: Path, world_size: int, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Updates and log-probs with whole logits, and with those of 9 tokens at a time."""
    from engine3d.training.engine import TrainEngine

    results, widest = [], [0]
    of_states = forward.logprobs_of_states

    def watched(states: torch.Tensor, *args: Any, chunk: int, **kwargs: Any) -> Any:
        widest.append(min(chunk, len(states)))
        return of_states(states, *args, chunk=chunk, **kwargs)

    forward.logprobs_of_states = watched
    for logits_tokens in (None, 9):
        config = TrainConfig(
            layout=LayoutConfig(**sizes),
            dtype="float32",
            micro_batch_tokens=48,
            optimizer=SETTINGS,
            logits_tokens=logits_tokens,
        )
        engine = TrainEngine(directory, config, Layout.of_world(world_size, **sizes), seed=1)
        called: list[Any] = []
        if engine.is_last_stage:
            engine.module.output_layer.register_forward_hook(lambda *_, called=called: called.append(1))
        sequences, mine = _local_samples(_samples(), engine)
        seen: dict[str, Any] = {"mine": mine, "norms": [], "losses": []}
        for _ in range(2):  # the first learning rate is 0
            result = engine.update(sequences, _loss, with_entropy=True)
            seen["norms"].append(result.grad_norm)
            seen["losses"].append([float(loss) for loss in result.loss_outputs])
        best = engine.logprobs(sequences, with_entropy=True, top=4)
        if best is not None:
            assert best.top_tokens is not None
            sequences.columns[CHOSEN] = best.top_tokens
        chosen = engine.logprobs(sequences, temperature=0.7)
        seen |= {"best": best, "chosen": chosen, "called": len(called), "widest": max(widest)}
        if engine.is_last_stage:
            assert bool(called) == (logits_tokens is None)
            assert max(widest) == (logits_tokens or 0)
        results.append(seen)
        engine.close()
    forward.logprobs_of_states = of_states
    return results


@pytest.mark.parametrize(
    ("directory", "sizes"),
    [
        pytest.param("qwen3_moe", {}, marks=pytest.mark.long),
        ("qwen3-tied", {"tp": 2}),
        pytest.param("qwen3-tied", {"pp": 2}, marks=pytest.mark.long),
        pytest.param("qwen3-tied", {}, marks=pytest.mark.release),
        pytest.param("qwen3_moe", {"tp": 2}, marks=pytest.mark.release),
        pytest.param("qwen3_moe", {"pp": 2}, marks=pytest.mark.release),
    ],
    ids=str,
    indirect=["directory"],
)
def test_an_engine_trains_the_same_in_chunks(directory: Path, sizes: dict[str, Any]) -> None:
    world_size = 2 if sizes else 1
    for at_once, chunks in run_distributed(_trained, world_size, directory, world_size, sizes, timeout_s=300):
        assert chunks["norms"] == pytest.approx(at_once["norms"], rel=1e-5)
        for one, other in zip(chunks["losses"], at_once["losses"], strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        if at_once["best"] is None:
            continue
        for name in ("best", "chosen"):
            for figure in ("logprobs", "entropy", "chosen_logprobs"):
                one, other = getattr(chunks[name], figure), getattr(at_once[name], figure)
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert torch.equal(chunks["best"].top_tokens, at_once["best"].top_tokens)


def test_the_estimate_has_the_logits_of_one_chunk(directory: Path) -> None:
    spec, layout = load_model_spec(directory), Layout()
    at = layout.coordinates(0)
    at_once, chunks = TrainConfig(dtype="bfloat16"), TrainConfig(dtype="bfloat16", logits_tokens=10)
    for peak in (update_peak, inference_peak):
        of_whole, of_pieces, of_few = (
            peak(spec, layout, at, config, tokens=tokens).logits
            for config, tokens in ((at_once, 100), (chunks, 100), (chunks, 10))
        )
        assert of_whole - of_pieces == 90 * spec.padded_vocabulary(layout) * 2
        assert of_few == peak(spec, layout, at, at_once, tokens=10).logits
