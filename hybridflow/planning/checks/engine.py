"""Checks of what engines and reward models would otherwise refuse once they have started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine3d.errors import UserError
from engine3d.input_files import MOST_LIST_BYTES, read_json_object
from engine3d.models import ModelSpec
from engine3d.models.lora.config import LoraConfig
from engine3d.rollout.config import RolloutConfig, SamplingConfig
from engine3d.rollout.served import (
    check_adapters,
    check_deterministic,
    check_device,
    check_input_blocks,
    check_on_gpus,
)
from engine3d.training.config import TrainConfig
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.cluster.devices.device_map import Device, DeviceMap
from hybridflow.metrics.precisions import compared_precisions
from hybridflow.roles.config import ModelConfig, PlacementConfig
from hybridflow.rollout.config import RolloutRole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def precision_notes(train: TrainConfig, engine: RolloutConfig, algorithm: AlgorithmSettings) -> list[str]:
    """Lines for trainers or engines in fp8 whose difference from each other nothing corrects."""
    exact = isinstance(algorithm, DistillationSettings) and algorithm.divergence_in == "loss"
    if algorithm.correction is not None or exact:
        return []
    altered = {f"rollout.engine.{name}": value for name, value in engine.altered_policy.items()}
    if train.precision is not None and engine.precision is None:
        altered["train.precision"] = train.precision
    return [
        f"{name}={value} without algorithm.correction: the engines draw from another policy than the one that is "
        f"trained ({compared_precisions(dict(train), dict(engine))}); expected a correction such as {{weights: token}}"
        for name, value in altered.items()
    ]


def check_engine_nodes(rollout: RolloutRole, devices: Sequence[Device]) -> None:
    """Every engine is on one node, or each on as many, with as many of its devices on each.

    Args:
        rollout: settings of the engines.
        devices: of the rollout role, which hold its engines one after another.

    Raises:
        UserError: engines that SGLang cannot be cut into, or that cannot do what the recipe asks for.
    """
    tp = rollout.engine.tp
    hosts = hosts_of_engine(devices, tp)
    share = max(1, tp // hosts)
    for engine, first in enumerate(range(0, len(devices), tp)):
        engine_devices = devices[first : first + tp]
        shares = [{device.node for device in engine_devices[start : start + share]} for start in range(0, tp, share)]
        if tp % hosts or any(len(nodes) > 1 for nodes in shares) or len(set.union(*shares)) != hosts:
            nodes = ", ".join(str(device.node) for device in engine_devices)
            expected = (
                f"{share} on each of {hosts} nodes, as the first engine's, " if tp % hosts == 0 and engine else ""
            )
            raise UserError(
                f"placement.rollout: the {tp} devices of engine {engine} are on nodes {nodes}; expected them on one, "
                f"or {expected or 'as many on each, '}node by node: by another rollout.engine.tp or other devices"
            )
    if hosts == 1:
        return
    settings, stream = rollout.engine, rollout.stream
    untried = [
        (rollout.lease, "rollout.lease=true", "false"),
        (settings.attention_dp > 1, f"rollout.engine.attention_dp={settings.attention_dp}", "1"),
        *((True, f"rollout.engine.{name}={value}", "null") for name, value in settings.altered_policy.items()),
        (settings.draft_tokens > 0, f"rollout.engine.draft_tokens={settings.draft_tokens}", "0"),
        (rollout.weights.rolling, "rollout.weights.rolling=true", "false"),
    ]
    if stream is not None:
        restarts = stream.engine_restarts
        untried.append((restarts > 0, f"rollout.stream.engine_restarts={restarts}", "0"))
    for used, setting, expected in untried:
        if used:
            raise UserError(
                f"{setting} with engines over {hosts} nodes each, which was not tried; expected {expected}, or "
                "engines that each fit on a node"
            )


def check_served_adapters(
    rollout: RolloutRole, adapters: LoraConfig, spec: ModelSpec | None, devices: Sequence[Device]
) -> None:
    """Refuse adapters apart from the model with engines that they were not tried with.

    Args:
        rollout: settings of the engines.
        adapters: that these get.
        spec: of the model; None where it is unknown.
        devices: of the rollout role.

    Raises:
        UserError: naming the setting.
    """
    if rollout.lease:
        raise UserError("train.lora.engine=adapter was not tried with rollout.lease; expected merged, or lease=false")
    if hosts_of_engine(devices, rollout.engine.tp) > 1:
        raise UserError("train.lora.engine=adapter was not tried with an engine on several hosts; expected merged")
    if spec is not None:
        check_adapters(spec, rollout.engine, adapters, on_gpu=devices[0].kind == "cuda")


def hosts_of_engine(devices: Sequence[Device], tp: int) -> int:
    """On how many nodes each engine is.

    Args:
        devices: of the rollout role, which hold its engines one after another.
        tp: devices of an engine.
    """
    return len({device.node for device in devices[:tp]})


def check_sampling(
    rollout: RolloutRole,
    placement: PlacementConfig,
    spec: ModelSpec,
    devices: Mapping[str, Sequence[Device]] | None,
) -> None:
    """Refuse sampling settings that SGLang does not support on the devices of the engines.

    Args:
        devices: of each role; None where they are another cluster's.

    Raises:
        UserError: naming the setting.
    """
    for setting, stops in (
        ("sampling", rollout.sampling.stop_token_ids),
        *(
            (f"adaptive_sampling.{row}", prompt_sampling.stop_token_ids or ())
            for row, prompt_sampling in enumerate(rollout.adaptive_sampling)
        ),
    ):
        if beyond := [token for token in stops if token >= spec.vocab_size]:
            raise UserError(
                f"rollout.{setting}.stop_token_ids: {beyond[0]} is no token of the model, whose vocabulary has "
                f"{spec.vocab_size}"
            )
    if devices is None and placement.cluster is None:
        return  # a device map that is wrong
    text = placement.rollout
    assert text is not None
    text = placement.pools.get(text, text)
    kind = devices["rollout"][0].kind if devices is not None else DeviceMap.parse(text).kind
    if kind != "node":  # of which only the cluster knows whether it has GPUs
        check_deterministic(spec, rollout.engine, on_gpu=kind == "cuda")
        check_device(rollout.engine, on_gpu=kind == "cuda")
        if kind == "cuda":
            check_on_gpus(spec)
            check_input_blocks(spec, rollout.engine)


def end_notes(
    sampling: SamplingConfig, model: ModelConfig, spec: ModelSpec, tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """A note where engines do not end a response at the tokenizer's end-of-sequence token.

    SGLang ends one at the `eos_token_id` of config.json, or of its `text_config`, and of generation_config.json.
    """
    end = tokenizer.eos_token_id
    if sampling.ignore_eos or end in sampling.stop_token_ids:
        return []
    configs, path = [{**spec.config.values, **spec.hf_config}], model.path
    if path is not None and (path / "generation_config.json").is_file():
        configs.append(read_json_object(path / "generation_config.json"))
    named = [config.get("eos_token_id") for config in configs]
    ends = {token for ids in named for token in (ids if isinstance(ids, list) else [ids]) if token is not None}
    if end in ends:
        return []
    others = f"at {', '.join(map(str, sorted(ends, key=str)))}" if ends else "at no token"
    return [
        f"model: eos_token_id of its configs ends responses {others}, and the tokenizer's eos_token is "
        f"{tokenizer.eos_token!r} ({end}): for responses that end there, add it to rollout.sampling.stop_token_ids"
    ]


def check_baselines(prompts: int, ranks: int) -> None:
    """A reward model that scores one greedy response to each prompt has one for each of its ranks.

    Args:
        prompts: of a step.
        ranks: data-parallel ranks of the reward model.

    Raises:
        UserError: it has not.
    """
    if prompts < ranks:
        raise UserError(
            f"trainer.prompts_per_step = {prompts}, expected at least {ranks}: a baseline for each data-parallel rank "
            "of the reward model"
        )


def check_same_tokens(role: str, path: Path, tokenizer: Path) -> None:
    """A model beside the actor reads the actor's tokens: where both have a `tokenizer.json`, they number alike.

    Tokens that were added to a vocabulary, such as those of a chat, may have other names.

    Raises:
        UserError: naming a token that is another in the model's vocabulary.
    """
    vocabulary, actor = _vocabulary(path), _vocabulary(tokenizer)
    if vocabulary is None or actor is None:
        return
    added = _added(tokenizer)
    for token, number in actor.items():
        if number not in added and vocabulary.get(token) != number:
            other = f"{vocabulary[token]} there" if token in vocabulary else "no token there"
            raise UserError(
                f"{role}.path: {path} has another tokenizer than the actor: {token!r} is token {number} of the actor "
                f"and {other}, expected a model of the actor's tokens"
            )


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Number of each token; None where there is no file that says so."""
    model = _tokenizer_file(directory).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary if isinstance(vocabulary, dict) else None


def _added(directory: Path) -> set[Any]:
    tokens = _tokenizer_file(directory).get("added_tokens")
    return {token.get("id") for token in tokens if isinstance(token, dict)} if isinstance(tokens, list) else set()


def _tokenizer_file(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer.json"
    return read_json_object(path, MOST_LIST_BYTES) if path.is_file() else {}
