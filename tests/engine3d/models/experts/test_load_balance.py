"""Losses of routers and the load of experts: the same on every layout and however samples are cut, against autograd
through transformers' model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine3d.models.files.weights import rank_parameters
from engine3d.models.rules import TensorSlice
from engine3d.training.config import OptimizerConfig
from engine3d.training.passes.sequences import Sequences
from engine3d.training.update import UpdateGuard
from tests.engine3d.checkpoint.writing.test_save import build_engine, save
from tests.support import tiny_families
from tests.support.distributed import run_distributed
from tests.support.gradients import gradients, slices

pytestmark = pytest.mark.processes

Z, SEQUENCE, UPDATE = 0.02, 0.7, 1.3
LOSSES = {
    "moe_z_loss_coeff": Z,
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [SEQUENCE, UPDATE],
}
LENGTHS = (5, 9, 16, 2, 12, 7, 14)
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"sizes": {}, "micro_batch_tokens": 1, "packing": False},
        {"sizes": {}, "micro_batch_tokens": 30},
        {"sizes": {}, "micro_batch_tokens": 30, "recompute": "full", "recompute_layers": 1},
        {"sizes": {}, "micro_batch_tokens": 30, "losses": {}},
    ],
    2: [
        {"sizes": {"tp": 2, "ep": 2}, "micro_batch_tokens": 30, "packing": False},
        {"sizes": {"pp": 2}, "micro_batch_tokens": 30},
        {"sizes": {"ep": 2}, "micro_batch_tokens": 1000, "dispatcher": "allgather"},
    ],
}
FURTHER_LAYOUTS: dict[int, list[dict[str, Any]]] = {
    1: [
        {"sizes": {}, "micro_batch_tokens": 1000},
        {"sizes": {}, "micro_batch_tokens": 30, "packing": False},
        {"sizes": {}, "micro_batch_tokens": 30, "recompute": "full"},
    ],
    2: [
        {"sizes": {"tp": 2}, "micro_batch_tokens": 30},
        {"sizes": {"pp": 2}, "micro_batch_tokens": 30, "losses": {}},
        {"sizes": {}, "micro_batch_tokens": 30},
        {"sizes": {"ep": 2}, "micro_batch_tokens": 30},
    ],
    4: [
        {"sizes": {"tp": 2, "pp": 2}, "micro_batch_tokens": 30},
        {"sizes": {"tp": 2, "ep": 2}, "micro_batch_tokens": 30, "packing": False},
    ],
}


@dataclass(frozen=True)
class _UpdateResult:
    """Results of one update: gradients, each with its slice of a HuggingFace tensor, and routing statistics."""

    gradients: list[tuple[TensorSlice, Tensor]]
    routing: Any
    grad_norm: float


def _samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in LENGTHS]


def _loss(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
    return -(outputs.logprobs * columns["weights"]).sum(), None


def _sequences(mine: list[list[int]]) -> Sequences:
    weights = [weight for sample in mine for weight in [0.0] + [1 / sum(LENGTHS)] * (len(sample) - 1)]
    return Sequences.of(mine, weights=torch.tensor(weights))


def _updates(directory: Path, ways: list[dict[str, Any]]) -> list[_UpdateResult]:
    """One update in each way from the same weights."""
    still = OptimizerConfig(lr=1e-30, clip_grad=0)  # gradients are looked at, weights stay
    results = []
    for way in ways:
        way = dict(way)
        losses = way.pop("losses", LOSSES) | {"moe_token_dispatcher_type": way.pop("dispatcher", "alltoall")}
        engine = build_engine(directory, way.pop("sizes"), optimizer=still, megatron=losses, **way)
        mine = _samples()[engine.coordinates.dp :: engine.layout.dp]
        result = engine.update(_sequences(mine), _loss)
        results.append(_UpdateResult(gradients(engine), result.routing, result.grad_norm))
        engine.close()
    return results


def _expected(model: Any) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Gradients by autograd through transformers' model, one sample at a time, and each layer's figures."""
    layers = [number for number, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    most, sigmoid = model.config.num_experts_per_tok, model.config.model_type == "deepseek_v3"
    experts = model.config.n_routed_experts if sigmoid else model.config.num_experts
    inputs: dict[int, list[Tensor]] = {number: [] for number in layers}
    for number in layers:
        model.model.layers[number].mlp.gate.register_forward_pre_hook(
            lambda _, given, number=number: inputs[number].append(given[0].reshape(-1, given[0].shape[-1]))
        )
    total = torch.zeros(())
    for sample in _samples():
        tokens = torch.tensor([sample])
        every = model(tokens).logits.log_softmax(dim=-1)
        total = total - every[0, :-1].gather(1, tokens[0, 1:, None]).sum() / sum(LENGTHS)
    statistics: dict[str, list[Any]] = {"loads": [], "z": [], "sequence": [], "update": []}
    for number in layers:
        gate = model.model.layers[number].mlp.gate.weight
        logits = [hidden @ gate.T for hidden in inputs[number]]
        scores = [layer.sigmoid() / layer.sigmoid().sum(dim=-1, keepdim=True) for layer in logits]
        if not sigmoid:
            scores = [layer.softmax(dim=-1) for layer in logits]
        given = [torch.zeros_like(layer).scatter(1, layer.topk(most, dim=1).indices, 1.0) for layer in scores]
        share = torch.cat(given).mean(dim=0) / most
        z = torch.cat(logits).logsumexp(dim=-1).square().mean()
        sequence = sum(
            len(one) / sum(LENGTHS) * experts * (load.mean(dim=0) / most * one.mean(dim=0)).sum()
            for load, one in zip(given, scores, strict=True)
        )
        update = experts * (share * torch.cat(scores).mean(dim=0)).sum()
        total = total + Z * z + SEQUENCE * sequence + UPDATE * update
        for name, figure in (("z", z), ("sequence", sequence), ("update", update)):
            statistics[name].append(float(figure.detach()))
        statistics["loads"].append([int(load) for load in torch.cat(given).sum(dim=0)])
    total.backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }, statistics


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Directories by family, each with the expected result of an update of the model in it."""
    directory = tmp_path_factory.mktemp("models")
    names = ("qwen3_moe", "deepseek_v3")
    return {name: (directory / name, _expected(tiny_families.make(name, directory / name))) for name in names}


@pytest.mark.parametrize(
    ("world_size", "ways"),
    [
        *LAYOUTS.items(),
        *(pytest.param(*further, marks=pytest.mark.release) for further in FURTHER_LAYOUTS.items()),
    ],
)
def test_routers_learn_alike_however_samples_are_cut(models: Any, world_size: int, ways: list[dict[str, Any]]) -> None:
    directory, expected = models["qwen3_moe"]
    _compare(run_distributed(_updates, world_size, directory, ways, timeout_s=300), ways, (0, 2, 3), *expected)


def test_routers_with_a_sigmoid_and_groups_of_experts(models: Any) -> None:
    """Their choices in balance losses are without groups and without the bias."""
    directory, expected = models["deepseek_v3"]
    ways = [{"sizes": {}, "micro_batch_tokens": 30}]
    _compare(run_distributed(_updates, 1, directory, ways, timeout_s=300), ways, (1, 2, 3), *expected, loads=False)


def _compare(
    ranks: list[list[_UpdateResult]],
    ways: list[dict[str, Any]],
    layers: tuple[int, ...],
    gradients: dict[str, Tensor],
    statistics: dict[str, list[Any]],
    *,
    loads: bool = True,
) -> None:
    for number, way in enumerate(ways):
        seen: set[str] = set()
        for rank in ranks:
            result = rank[number]
            assert result.routing.layers == layers
            if loads:
                assert [list(layer) for layer in result.routing.loads] == statistics["loads"], way
            if "losses" in way:
                assert (result.routing.z, result.routing.sequence, result.routing.update) == (None, None, None)
                continue
            for tensor_slice, gradient in result.gradients:
                if tensor_slice.hf_name in gradients:  # transformers has experts in tensors of its own
                    seen.add(tensor_slice.hf_name)
                    right = gradients[tensor_slice.hf_name]
                    limit = 2e-5 * float(right.abs().max())
                    where = f"{way} {tensor_slice.hf_name}: "
                    torch.testing.assert_close(
                        gradient, right[slices(tensor_slice.hf_box)], rtol=1e-3, atol=limit, msg=where.__add__
                    )
            for name in ("z", "sequence", "update"):
                assert getattr(result.routing, name) == pytest.approx(sum(statistics[name]) / 3, rel=1e-4), (
                    way,
                    name,
                )
            assert result.grad_norm == pytest.approx(ranks[0][0].grad_norm, rel=1e-4)
        assert "losses" in way or seen == {name for name in gradients if "mlp.experts" not in name}


RATE = 0.001
BIASES = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3)]


def _moves(directory: Path, results: Path, way: dict[str, Any]) -> dict[str, Any]:
    """Expert biases after a refused, a not finite and a real update, in a checkpoint and in an export; and loads."""
    from engine3d.checkpoint.writing.save import EngineCheckpoint

    way = dict(way)
    sizes, settings = way.pop("sizes"), {"megatron": {"moe_router_bias_update_rate": RATE}, **way}
    engine = build_engine(directory, sizes, **settings)
    sequences = _sequences(_samples()[engine.coordinates.dp :: engine.layout.dp])
    loads = [torch.zeros(8) for _ in BIASES]

    def count(number: int) -> Any:
        def hook(_: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
            loads[number].add_(output[1].sum(dim=0))

        return hook

    def broken(outputs: Any, columns: dict[str, Tensor]) -> tuple[Tensor, None]:
        return outputs.logprobs.sum() * torch.nan, None

    def in_files(values: list[Tensor]) -> Tensor:
        """(layers, experts) figures of a rank's routers, with experts numbered as in files."""
        parameters: Any = rank_parameters(engine.module, engine.spec, engine.layout, engine.coordinates)
        rules = [local for local, _ in parameters if local.buffer]
        result = torch.zeros(len(rules), len(values[0]))
        for row, local, value in zip(result, rules, values, strict=True):
            for tensor_slice in local.slices:
                row[slices(tensor_slice.hf_box)] = value[slices(tensor_slice.local_box)]
        return result

    def biases() -> Tensor:
        return in_files([layer.mlp.router.expert_bias for layer in engine.module.decoder.layers[1:]])

    refusing = UpdateGuard(lambda outputs: (torch.ones(()), torch.ones(())), lambda mean: True)
    addresses = [layer.mlp.router.expert_bias.data_ptr() for layer in engine.module.decoder.layers[1:]]
    seen: dict[str, Any] = {"before": biases()}
    seen["not applied"] = [
        engine.update(sequences, broken).applied,
        engine.update(sequences, _loss, guard=refusing).applied,
    ]
    seen["left"] = biases()
    engine.logprobs(sequences)
    hooks = [
        layer.mlp.router.register_forward_hook(count(number))
        for number, layer in enumerate(engine.module.decoder.layers[1:])
    ]
    result = engine.update(sequences, _loss)
    assert result.applied
    for hook in hooks:
        hook.remove()
    # Engines that share a device map this memory.
    assert addresses == [layer.mlp.router.expert_bias.data_ptr() for layer in engine.module.decoder.layers[1:]]
    seen |= {"after": biases(), "loads": in_files(loads), "routing": result.routing}
    engine.export(results / "exported")
    checkpoint = EngineCheckpoint(engine)
    save(engine, checkpoint, results / "saved", background=False)
    engine.close()
    engine = build_engine(directory, sizes, load=False, **settings)
    EngineCheckpoint(engine).load(results / "saved")
    seen["loaded"] = biases()
    engine.close()
    return seen


def test_expert_biases_move_with_updates_that_are_made(models: Any, tmp_path: Path) -> None:
    directory, _ = models["deepseek_v3"]
    [seen] = run_distributed(
        _moves, 1, directory, tmp_path / "one", {"sizes": {}, "micro_batch_tokens": 30}, timeout_s=300
    )
    assert seen["not applied"] == [False, False]
    assert torch.equal(seen["left"], seen["before"])
    loads = seen["loads"]
    assert torch.equal(loads.sum(dim=1), torch.full((3,), 4.0 * sum(LENGTHS)))
    assert [list(layer) for layer in seen["routing"].loads] == loads.tolist()
    assert torch.equal(torch.tensor(seen["routing"].biases), seen["before"])
    expected = seen["before"] + RATE * (loads.mean(dim=1, keepdim=True) - loads).sign()
    torch.testing.assert_close(seen["after"], expected, rtol=0, atol=1e-7)
    assert (seen["after"] != seen["before"]).sum() > 12
    assert torch.equal(seen["loaded"], seen["after"])

    padded = {"sizes": {"ep": 2}, "micro_batch_tokens": 40, "packing": False}
    ranks = run_distributed(_moves, 2, directory, tmp_path / "two", padded, timeout_s=300)
    for rank in ranks:
        assert torch.equal(rank["left"], seen["before"]) and torch.equal(rank["loaded"], rank["after"])
        torch.testing.assert_close(rank["after"], seen["after"], rtol=0, atol=1e-7)
        assert rank["routing"] == seen["routing"]
    assert float(sum(rank["loads"].sum() for rank in ranks)) > float(loads.sum())  # the router saw padding too
    for world, after in (("one", seen["after"]), ("two", ranks[0]["after"])):
        exported = _read(tmp_path / world / "exported")
        for name, bias in zip(BIASES, after, strict=True):
            assert torch.equal(exported[name], bias)


def _read(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
