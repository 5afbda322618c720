"""Tests of Transformer Engine on a GPU: its layers have the same model, and are trained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.random_engine import random_engine, random_sequences, train_on
from engine3d.checkpoint.digests.digest import weights_digest
from engine3d.layout import Layout
from engine3d.models.precision import rounded, rounded_rows
from engine3d.platform import platform
from engine3d.training.config import OptimizerConfig, TrainConfig
from tests.engine3d.training.test_engine import LAYOUTS, SETTINGS, _train, _weighted
from tests.support import tiny_families
from tests.support.distributed import run_distributed

if TYPE_CHECKING:
    from engine3d.training.engine import TrainEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not platform.has_transformer_engine, reason="needs a GPU and Transformer Engine"),
]


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 60, (24,), generator=generator).tolist()
    return [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]


def _loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = -(outputs.logprobs * columns["weights"]).sum()
    return loss, loss.detach()


def _logprobs_and_losses(directory: Path, packing: bool) -> tuple[torch.Tensor, list[float]]:
    from engine3d.training.engine import TrainEngine

    config = TrainConfig(dtype="bfloat16", packing=packing, micro_batch_tokens=512, optimizer=OptimizerConfig(lr=1e-3))
    engine = TrainEngine(directory, config, Layout())
    samples = _samples()
    sequences = _weighted(samples, list(range(len(samples))))
    outputs = engine.logprobs(sequences)
    assert outputs is not None and outputs.logprobs is not None
    losses = [float(sum(engine.update(sequences, _loss).loss_outputs)) for _ in range(4)]
    engine.export(directory.with_name(f"exported-{packing}"))
    engine.close()
    return outputs.logprobs, losses


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3-tied", "llama", "deepseek_v3", "deepseek_v3-queries"])
def test_transformer_engine_holds_the_same_model(name: str, tmp_path: Path) -> None:
    model = tiny_families.make(name, tmp_path / "model").to("cuda")
    expected = []
    for sample in _samples():
        tokens = torch.tensor([sample], device="cuda")
        with torch.no_grad():
            every = model(tokens).logits.float().log_softmax(dim=-1)
        expected.append(torch.cat([torch.zeros(1), every[0, :-1].gather(1, tokens[0, 1:, None])[:, 0].cpu()]))
    reference = torch.cat(expected)
    for packing in (True, False):
        [(logprobs, losses)] = run_distributed(_logprobs_and_losses, 1, tmp_path / "model", packing, timeout_s=180)
        difference = (logprobs - reference).abs()
        assert difference.mean() < 0.05, f"packing={packing}: mean {difference.mean():.4f}, max {difference.max():.4f}"
        assert losses[-1] < losses[0]


def _ways_to_need_less(directory: Path) -> list[dict[str, Any]]:
    """Updates that keep everything where it is made, and others that do not."""
    os.environ |= platform.training_environment(1, deterministic=True)
    aware = SETTINGS.model_copy(update={"precision_aware": True})
    ways: list[dict[str, Any]] = [
        {"optimizer": aware},
        {"optimizer": aware.model_copy(update={"offload": True})},
        {"optimizer": aware.model_copy(update={"offload": True, "overlap_offload": True})},
        {"optimizer": aware, "recompute": "selective"},
        {"optimizer": aware, "recompute": "full", "recompute_layers": 1},
        {"optimizer": aware, "recompute": "full"},
    ]
    return [_train(directory, {}, 1, dtype="bfloat16", deterministic=True, **way) for way in ways]


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_what_needs_less_memory_learns_the_same(name: str, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    [[kept, *others]] = run_distributed(_ways_to_need_less, 1, tmp_path / "model", timeout_s=300)
    for other in others:
        assert other["losses"] == kept["losses"] and other["norms"] == kept["norms"]
        assert torch.equal(other["after"], kept["after"])


def _wide_engine(**settings: bool) -> TrainEngine:
    """An engine with an embedding whose optimizer state is larger than any fragment of a micro-batch's memory."""
    config = tiny_families.CONFIGS["llama"] | {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "vocab_size": 65536,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    optimizer = OptimizerConfig(precision_aware=True, offload=True, **settings)
    return random_engine(config, Layout(), dtype="bfloat16", optimizer=optimizer, micro_batch_tokens=4096)


def _memory_of_updates() -> list[dict[str, int]]:
    engine = _wide_engine()
    sequences = random_sequences(engine, 3 * 4096, 1024)
    results = []
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        train_on(engine, sequences)
        most = {"peak": torch.cuda.max_memory_allocated(), "peak reserved": torch.cuda.max_memory_reserved()}
        # With what the update has taken in, but for the first one, and then by reading all.
        assert weights_digest(engine) == weights_digest(engine)
        engine.offload()
        results.append(most | {"kept": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()})
    return results


def _state_on_its_way() -> tuple[list[str], int, int]:
    """Digests after an update, and bytes of the device that are free when the state is in host memory again."""
    engine = _wide_engine(overlap_offload=True)
    sequences = random_sequences(engine, 3 * 4096, 1024)
    for _ in range(2):
        train_on(engine, sequences)
        weights_digest(engine)
    train_on(engine, sequences)
    results = [weights_digest(engine), weights_digest(engine)]  # with what the update has taken in, and by reading all
    engine.offload()
    results.append(weights_digest(engine))
    going = torch.cuda.memory_allocated()
    engine.onload()
    assert engine.host_state is not None
    return [*results, weights_digest(engine)], going - torch.cuda.memory_allocated(), engine.host_state.nbytes


def test_a_state_on_its_way_to_host_memory_is_there_to_be_read() -> None:
    [(digests, freed, nbytes)] = run_distributed(_state_on_its_way, 1, timeout_s=180)
    assert len(set(digests)) == 1 and freed >= nbytes > 10**8


def test_an_updates_memory_is_not_left_in_pieces() -> None:
    [[_, *updates]] = run_distributed(_memory_of_updates, 1, timeout_s=180)
    for update in updates:
        assert update["reserved"] - update["kept"] < 64 << 20, update
        assert update["peak reserved"] < 1.15 * update["peak"], update


def _with_experts_of_each_kind(directory: Path) -> list[dict[str, Any]]:
    """Train with fused experts, with grouped GEMMs, and with Transformer Engine's experts."""
    from engine3d.models import transformer_engine_modules as modules
    from engine3d.models.experts import moe_layer

    where = {"fused_experts": moe_layer, "grouped_linear": modules}
    calls = dict.fromkeys(where, 0)

    def counted(name: str) -> Any:
        function = getattr(where[name], name)

        def call(*arguments: Any, **named: Any) -> torch.Tensor:
            calls[name] += 1
            result: torch.Tensor = function(*arguments, **named)
            return result

        return call

    results = []
    for fused, may in ((True, True), (False, True), (False, False)):
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                calls[name] = 0
                patch.setattr(where[name], name, counted(name))
            if not may:
                patch.setattr(modules._Grouped, "has_kernel", lambda *_: False)
            trained = _train(directory, {}, 1, dtype="bfloat16", fused_experts=fused)
            results.append(trained | {"calls": [count > 0 for count in calls.values()]})
    return results


def test_grouped_experts_are_transformer_engines(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "model")
    [[fused, grouped, other]] = run_distributed(_with_experts_of_each_kind, 1, tmp_path / "model", timeout_s=300)
    assert [result["calls"] for result in (fused, grouped, other)] == [[True, False], [False, True], [False, False]]
    for one in (fused, grouped):
        assert one["losses"] == pytest.approx(other["losses"], rel=2e-3)
        assert one["norms"] == pytest.approx(other["norms"], rel=0.02)
        assert (one["before"] - other["before"]).abs().mean() < 0.01
        assert (one["after"] - other["after"]).abs().mean() < 0.03


def _quantised_by_both() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights and inputs as Transformer Engine's blockwise recipe and the precision contract round them."""
    from transformer_engine.pytorch import Float8BlockQuantizer
    from transformer_engine.pytorch.constants import TE_DType

    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(512, 384, generator=generator, device="cuda")
    values *= 2.0 ** torch.randint(-6, 6, values.shape, generator=generator, device="cuda")
    pairs = []
    for dimensions, contract in ((2, rounded), (1, rounded_rows)):
        quantiser = Float8BlockQuantizer(
            fp8_dtype=TE_DType[torch.float8_e4m3fn],
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=True,
            block_scaling_dim=dimensions,
        )
        given = values.bfloat16()
        pairs.append((quantiser(given).dequantize().float(), contract(given).float()))
    return pairs


def test_transformer_engine_quantises_as_the_contract() -> None:
    for actual, expected in _quantised_by_both():
        assert torch.equal(actual, expected)


def _train_in(directory: Path, settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [_train(directory, {}, 1, dtype="bfloat16", **further) for further in settings]


def test_a_linear_layer_in_fp8_multiplies_the_operands_of_the_contract() -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    generator = torch.Generator("cuda").manual_seed(0)
    layer = te.Linear(384, 512, bias=False, params_dtype=torch.bfloat16)
    given = torch.randn(48, 384, generator=generator, device="cuda").bfloat16().requires_grad_()
    with te.autocast(enabled=True, recipe=Float8BlockScaling(fp8_format=Format.E4M3)):  # as Megatron-Core makes it
        actual = layer(given)
    expected = rounded_rows(given).float() @ rounded(layer.weight).float().T
    unquantised = given.float() @ layer.weight.float().T
    scale = expected.norm()
    assert (actual - expected).norm() < 0.004 * scale
    assert (actual - unquantised).norm() > 0.01 * scale
    actual.backward(torch.ones_like(actual))
    gradient = torch.ones_like(actual).float() @ rounded(layer.weight).float()
    assert given.grad is not None and (given.grad - gradient).norm() < 0.004 * gradient.norm()


WAYS_OF_FP8 = [(None, "none"), ("fp8", "none"), ("fp8", "selective"), ("fp8", "full")]


@pytest.mark.parametrize("name", ["qwen3_moe-blocks", "qwen3-biases-blocks"])
def test_training_in_fp8_learns_as_in_bf16(name: str, tmp_path: Path) -> None:
    tiny_families.make(name, tmp_path / "model")
    ways = [{"precision": precision, "recompute": recompute} for precision, recompute in WAYS_OF_FP8]
    [results] = run_distributed(_train_in, 1, tmp_path / "model", ways, timeout_s=300)
    plain, quantised, *others = results
    assert 0 < (quantised["before"] - plain["before"]).abs().mean() < 0.6
    assert quantised["losses"] == pytest.approx(plain["losses"], rel=0.25)
    assert quantised["losses"][-1] < quantised["losses"][0]
    for other in others:
        assert other["losses"] == pytest.approx(quantised["losses"], rel=0.01)
        assert other["norms"] == pytest.approx(quantised["norms"], rel=0.05)


def _train_all(directory: Path, world_size: int) -> list[dict[str, Any]]:
    return [_train(directory, sizes, world_size, dtype="bfloat16") for sizes in LAYOUTS[world_size]]


@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_layout_learns_alike_over_nccl(world_size: int, tmp_path: Path) -> None:
    if platform.gpus < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    tiny_families.make("qwen3_moe", tmp_path / "model")
    [[alone]] = run_distributed(_train_all, 1, tmp_path / "model", 1, timeout_s=180)
    ranks = run_distributed(_train_all, world_size, tmp_path / "model", world_size, timeout_s=300)
    for number, sizes in enumerate(LAYOUTS[world_size]):
        for rank in ranks:
            assert rank[number]["losses"] == pytest.approx(alone["losses"], rel=0.01), sizes
            assert rank[number]["norms"] == pytest.approx(alone["norms"], rel=0.1), sizes


SHARED: list[dict[str, Any]] = [{}, {"fused_query_key": True}, {"logits_tokens": 16, "recompute": "full"}]
"""Settings of training with context parallelism."""


def _train_shared(directory: Path, sizes: dict[str, int], world_size: int, fused: bool) -> list[dict[str, Any]]:
    return [
        _train(directory, sizes, world_size, dtype="bfloat16", **settings)
        for settings in SHARED
        if fused or "fused_query_key" not in settings
    ]


@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
@pytest.mark.parametrize("sizes", [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "ep": 4}])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_ranks_that_share_sequences_learn_alike(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    world_size = 2 if sizes == {"cp": 2} else 4
    if platform.gpus < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    tiny_families.make(name, tmp_path / "model")
    fused = name != "deepseek_v3"
    [alone] = run_distributed(_train_shared, 1, tmp_path / "model", {}, 1, fused, timeout_s=180)
    ranks = run_distributed(_train_shared, world_size, tmp_path / "model", sizes, world_size, fused, timeout_s=300)
    for rank in ranks:
        for shared, expected in zip(rank, alone, strict=True):
            assert shared["losses"] == pytest.approx(expected["losses"], rel=0.01)
            assert shared["norms"] == pytest.approx(expected["norms"], rel=0.1)
            if shared["before"] is not None and rank[0]["mine"] == alone[0]["mine"]:
                assert (shared["before"] - expected["before"]).abs().mean() < 0.05


def _train_with_copies(directory: Path) -> list[dict[str, Any]]:
    from engine3d.models.experts import row_capacity

    gathering, again = {"moe_token_dispatcher_type": "allgather"}, [0]
    waiting = row_capacity.PredictedCapacity.waiting

    def counted(ahead: row_capacity.PredictedCapacity) -> Any:
        again[0] += 1
        return waiting(ahead)

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_capacity, "LEAST_TOKENS", 16)
        patch.setattr(row_capacity, "LEAST_CHUNKS", 1)
        patch.setattr(row_capacity, "MOST_OF_EVEN", 100.0)
        patch.setattr(row_capacity.PredictedCapacity, "waiting", counted)
        for copies, recompute, slack in (
            (False, "none", None),
            (True, "none", None),
            (True, "full", None),
            (False, "none", row_capacity.SLACK),
            (True, "none", 1.0),
            (True, "full", 1.0),
            (True, "none", -0.5),  # all but the first pass is computed again
        ):
            again[0] = 0
            patch.setattr(row_capacity, "SLACK", slack)
            settings: dict[str, Any] = {
                "copy_engine_dispatcher": copies,
                "recompute": recompute,
                "predicted_expert_capacity": slack is not None,
            }
            trained = _train(directory, {"ep": 2}, 2, dtype="bfloat16", megatron=gathering, **settings)
            results.append(trained | {"again": again[0]})
    return results


@pytest.mark.skipif(platform.gpus < 2, reason="needs two GPUs")
def test_copies_of_experts_tokens_are_collective_operations(tmp_path: Path) -> None:
    tiny_families.make("qwen3_moe", tmp_path / "model")
    for without, *others in run_distributed(_train_with_copies, 2, tmp_path / "model", timeout_s=300):
        assert [result["again"] > 0 for result in others[-3:]] == [False, False, True]
        for result in others:
            assert result["losses"] == pytest.approx(without["losses"], rel=2e-3)
            assert result["norms"] == pytest.approx(without["norms"], rel=0.02)
            assert (result["before"] - without["before"]).abs().mean() < 0.01


def _with_attention(directory: Path, backend: str) -> dict[str, Any]:
    """Updates on sequences shorter and longer than a kernel's tiles, and which attention Transformer Engine took."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends as chosen

    from engine3d.training.engine import TrainEngine

    options = {"optimizer": SETTINGS, "fused_query_key": True, "megatron": {"attention_backend": backend}}
    engine = TrainEngine(directory, TrainConfig(dtype="bfloat16", micro_batch_tokens=2048, **options), Layout())
    generator = torch.Generator().manual_seed(0)
    lengths = [2, 3, 127, 128, 129, *torch.randint(2, 900, (9,), generator=generator).tolist()]
    samples = [torch.randint(0, 90, (length,), generator=generator).tolist() for length in lengths]
    sequences = _weighted(samples, list(range(len(samples))))
    before = engine.logprobs(sequences)
    updates = [engine.update(sequences, _loss) for _ in range(3)]
    after = engine.logprobs(sequences)
    assert before is not None and after is not None
    engine.close()
    return {
        "before": before.logprobs,
        "after": after.logprobs,
        "losses": [float(sum(update.loss_outputs)) for update in updates],
        "norms": [update.grad_norm for update in updates],
        "flash": chosen["use_flash_attention"] and str(chosen["flash_attention_backend"])[0],
    }


@pytest.mark.parametrize("head_dim", [64, 128])
def test_flash_attention_is_the_other_attention(head_dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny_families.CONFIGS, "wide", tiny_families.MOE | {"head_dim": head_dim})
    tiny_families.make("wide", tmp_path / "model")
    auto, flash = (
        run_distributed(_with_attention, 1, tmp_path / "model", backend, timeout_s=180)[0]
        for backend in ("auto", "flash")
    )
    assert not auto["flash"] and flash["flash"] == "4"
    assert flash["losses"] == pytest.approx(auto["losses"], rel=2e-3)
    assert flash["norms"] == pytest.approx(auto["norms"], rel=0.02)
    assert (flash["before"] - auto["before"]).abs().mean() < 0.01
    assert (flash["after"] - auto["after"]).abs().mean() < 0.03
