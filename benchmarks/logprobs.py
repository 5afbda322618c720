"""Log-probs of stored samples beside transformers', with the weights that drew each token.

    python benchmarks/logprobs.py RUN_DIRECTORY [--samples 400] [--device cuda]

of a run that keeps a checkpoint of every step and all of its samples (`checkpoint.save_interval=1`,
`samples.keep_mb=null`). Each checkpoint is exported and loaded by transformers in float32. The log-prob of each token
of a response is computed with the weights of the token's own version and with those of the version before, and compared
with what the engine said when it drew the token.

Prints a table of the absolute differences, and last one JSON object. With the own version they are those of the
engine's data type; with the version before they are how far the policy has moved, without which the first says nothing.
Tokens of a version of which there is no checkpoint are counted and left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from benchmarks.reshard_plan import Parser, versions
from engine3d.checkpoint.adapters import export_merged
from engine3d.checkpoint.hf import export_checkpoint
from engine3d.checkpoint.manifest import find_checkpoints
from engine3d.errors import UserError
from engine3d.models import load_model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.files.weights import begin_export, finish_export
from engine3d.models.precision import Precision
from engine3d.rollout.requests import BEGINS
from hybridflow.checkpoint.driver_state import RunState
from hybridflow.config.recipe import load_recipe
from hybridflow.rundir.file_names import RECIPE, SAMPLE_STORE
from hybridflow.rundir.kept_recipe import saved_to
from hybridflow.rundir.samples.files import stored_steps

FIRST, LATER, BEFORE = "the response's first version", "a later version", "one version older"
_COLUMNS = ["sample_id", "prompt_tokens", "response_tokens", "logprobs", "policy_version", "token_versions"]
_FAR = 5
"""Tokens of each kind that are reported: those that are furthest off."""


@dataclass(frozen=True)
class StoredResponse:
    """A stored sample.

    Args:
        sample: its id.
        tokens: of prompt and response.
        prompt: tokens of the prompt.
        logprobs: of each token of the response, in the natural logarithm, as the engine gave them.
        versions: of the weights by which each token of the response was drawn.
    """

    sample: int
    tokens: tuple[int, ...]
    prompt: int
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class Drawing:
    """Engines' settings when they drew tokens.

    Args:
        dtype: of their weights.
        temperature: that their log-probs are of, 1 for the most likely tokens.
        precision: of their quantised weights.
        adapters: True if checkpoints hold adapters, which the engines had merged or added.
    """

    dtype: str
    temperature: float
    precision: Precision | None = None
    adapters: bool = False


@dataclass(frozen=True)
class Distance:
    """A token of a response, and how far its log-prob is off.

    Args:
        sample, position: the sample's id, and the token's position in the response.
        version: of the weights that drew the token.
        kind: with which weights it was computed: `FIRST` and `LATER` are of the token's version, `BEFORE` is not.
        distance: absolute difference of the log-probs.
    """

    sample: int
    position: int
    version: int
    kind: str
    distance: float


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 for arguments that cannot be right."""
    parser = Parser(prog="logprobs.py", description="Log-probs of stored samples beside transformers'.")
    parser.add_argument("run", type=Path, metavar="RUN_DIRECTORY")
    parser.add_argument("--samples", type=int, default=400, help="at most so many, evenly over all that are stored")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    try:
        options = parser.parse_args(arguments)
        if options.samples < 1:
            raise UserError(f"--samples: {options.samples}, expected at least 1")
        responses = stored_responses(options.run)
        chosen = responses[:: max(1, -(-len(responses) // options.samples))]
        checkpoints = checkpoints_by_version(options.run)
        recipe = load_recipe(options.run / RECIPE)
        engine, temperature = recipe.rollout.engine, recipe.rollout.sampling.temperature or 1.0
        engines = Drawing(engine.dtype, temperature, engine.precision, adapters=recipe.train.lora is not None)
        measured = list(distances(chosen, checkpoints, engines, options.device))
    except UserError as error:
        print(f"logprobs.py: {error}", file=sys.stderr)
        return 2
    versions_seen = {version for response in chosen for version in response.versions if version >= 0}
    left_out = sum(version >= 0 and version not in checkpoints for response in chosen for version in response.versions)
    summaries = {
        kind: summary([distance for distance in measured if distance.kind == kind]) for kind in (FIRST, LATER, BEFORE)
    }
    print("| weights | tokens | mean | 99 % | most |\n|---|---|---|---|---|")
    for kind, values in summaries.items():
        if values:
            print(
                f"| {kind} | {values['tokens']:,} | {values['mean']:.2g} | {values['p99']:.2g} | {values['most']:.2g} |"
            )
    print(f"{len(chosen)} of {len(responses)} samples, {len(versions_seen)} versions, {left_out} tokens left out")
    result = {"versions_of_weights": sorted(versions_seen), "left_out": left_out, "distances": summaries}
    print(json.dumps(result | {"device": options.device, "versions": versions()}))
    return 0


def stored_responses(run: Path) -> list[StoredResponse]:
    """All samples of a run, in the order of steps.

    Raises:
        UserError: there are none, or a sample is there twice.
    """
    files = stored_steps(run / SAMPLE_STORE)
    responses = [_response(row) for path in files.values() for row in pq.read_table(path, columns=_COLUMNS).to_pylist()]
    if not responses:
        raise UserError(f"{run}: no stored samples, expected those of a run with samples.store=true")
    if len({response.sample for response in responses}) < len(responses):
        raise UserError(f"{run}: samples are stored twice, expected each once")
    return responses


def _response(row: Mapping[str, Any]) -> StoredResponse:
    prompt, response = row["prompt_tokens"], row["response_tokens"]
    token_versions = row["token_versions"] or [row["policy_version"]] * len(response)
    return StoredResponse(
        row["sample_id"], (*prompt, *response), len(prompt), tuple(row["logprobs"]), tuple(token_versions)
    )


def checkpoints_by_version(run: Path) -> dict[int, Path]:
    """The whole checkpoint of each version of the weights.

    Raises:
        UserError: there is none.
    """
    root = saved_to(run)
    complete = find_checkpoints(root)[0] if root is not None else []
    if not complete:
        raise UserError(f"{run}: no whole checkpoint, expected those of a run with checkpoint.save_interval=1")
    return {RunState.read(directory).policy_version: directory for directory in complete}


def distances(
    responses: Sequence[StoredResponse], checkpoints: Mapping[int, Path], engines: Drawing, device: str
) -> Iterator[Distance]:
    """Yield the distance of each token's log-prob, for one version of the weights after the other.

    Args:
        responses: to look at.
        checkpoints: of each version.
        engines: that drew them.
        device: that computes.
    """
    for version in sorted(checkpoints):
        concerned = [response for response in responses if not {version, version + 1}.isdisjoint(response.versions)]
        if not concerned:
            continue
        model = _loaded(checkpoints[version], engines, device)
        for response in concerned:
            computed = _logprobs(model, response, engines.temperature, device)
            for position, (drawn_by, given) in enumerate(zip(response.versions, response.logprobs, strict=True)):
                if drawn_by in (version, version + 1):
                    drawn_kind = FIRST if drawn_by == response.versions[0] else LATER
                    kind = drawn_kind if drawn_by == version else BEFORE
                    yield Distance(response.sample, position, drawn_by, kind, abs(given - computed[position]))
        del model


def _loaded(checkpoint: Path, engines: Drawing, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory(prefix="logprobs-") as directory:
        exported = Path(directory, "model")
        if engines.adapters:
            export_merged(checkpoint, exported, verify=False)
        else:
            export_checkpoint(checkpoint, exported, dtype=engines.dtype, precision=engines.precision, verify=False)
        if engines.precision is not None:
            exported = dequantised(exported)
        model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
        return model.to(device).eval()


def dequantised(model: Path) -> Path:
    """Write the weights of a directory in fp8 in float32 into one next to it, which transformers reads on a CPU."""
    spec, name = load_model_spec(model), f"{model.name}-dequantised"
    with TensorFiles(model) as files:
        boxes = {key: tuple((0, size) for size in tensor.shape) for key, tensor in spec.hf_tensors.items()}
        weights = {key: files.read(key, box) for key, box in boxes.items()}
    partial = model.with_name(f".{name}.partial")
    begin_export(model.with_name(name), partial)
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    finish_export(spec, torch.float32, partial, model.with_name(name))
    return model.with_name(name)


@torch.no_grad()
def _logprobs(model: Any, response: StoredResponse, temperature: float, device: str) -> list[float]:
    """Log-prob of each token of the response, by one forward pass of batch 1 without a cache for each sequence.

    0 of a token that begins a sequence.
    """
    ends = [position for position, version in enumerate(response.versions, response.prompt) if version == BEGINS]
    drawn: list[float] = []
    for begin, end in pairwise([0, *ends, len(response.tokens)]):
        tokens = torch.tensor([response.tokens[begin:end]], device=device)
        logits = model(tokens, use_cache=False).logits[0, :-1].float() / temperature
        drawn += [0.0, *logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].tolist()]
    return drawn[response.prompt :]


def summary(measured: Sequence[Distance]) -> dict[str, Any]:
    """Tokens, mean, 99th percentile and most of the distances, and the tokens furthest off; empty of none."""
    if not measured:
        return {}
    furthest = sorted(measured, key=lambda distance: distance.distance, reverse=True)
    return {
        "tokens": len(measured),
        "mean": sum(distance.distance for distance in measured) / len(measured),
        "p99": furthest[len(measured) // 100].distance,
        "most": furthest[0].distance,
        "furthest": [
            {
                "sample": distance.sample,
                "position": distance.position,
                "version": distance.version,
                "distance": distance.distance,
            }
            for distance in furthest[:_FAR]
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
