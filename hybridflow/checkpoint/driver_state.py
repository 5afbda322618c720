"""The driver's state between two steps: all that later steps depend on, but for the state of the roles."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import re
import struct
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from engine3d.durable import naming
from engine3d.errors import EngineError, UserError, shortened
from engine3d.input_files import MOST_LIST_BYTES, check_regular, read_json_object
from engine3d.json_records import first_error
from engine3d.startup.lazy_imports import torch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.checkpoint.set_results import Best, MeasuredSet
from hybridflow.data.sampler import RATES, RETURNED, check_state
from hybridflow.rollout.buffered_groups import BufferedGroups

if TYPE_CHECKING:
    from torch import Tensor

DRIVER = "driver.json"
_MEASURED = ("first_measured", "last_measured")
_KEPT = "kept.safetensors"
_EARLIER = ("accuracy_before", "accuracy_after", "first_evaluation", "last_evaluation", "first_of_sets", "last_of_sets")
"""Evaluations of formats up to 4, which count as none: a resumed run begins to compare with its next evaluation."""
_REPLAY = "replay.safetensors"
_GROUPS = {"ended": "groups-ended.safetensors", "begun": "groups-begun.safetensors"}
_IN_FILES = ("groups", "replay", "kept")
"""Fields that are not in driver.json as they are."""
_OLD_GROUPS = {"ended": "stream-ended.safetensors", "begun": "stream-begun.safetensors"}
_OLD_BATCH = re.compile(r"buffer-\d{5,}\.safetensors")
"""Files up to format 4, which has a batch that was generated ahead as `buffer`, and a stream's groups as `stream`."""


_TORCH_STATE_BYTES, _TORCH_STATE_WORDS = 5056, 624
_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class RandomState:
    """The states of this process's random number generators, as JSON holds them."""

    python: list[Any]
    numpy: list[Any]
    torch: str

    @classmethod
    def capture(cls) -> RandomState:
        """Capture the current states."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return cls(
            python=[version, list(words), gauss],
            numpy=[name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],  # type: ignore[union-attr]
            torch=base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        )

    @staticmethod
    def seed(seed: int) -> None:
        """Start all of them from one seed."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def restore(self) -> None:
        """Restore the states."""
        version, words, gauss = self.python
        random.setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = self.numpy
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(self.torch)), dtype=torch.uint8))


@dataclass(frozen=True)
class Measurements:
    """The evaluations of a run.

    Args:
        first, last: measurement of each held-out set, by its name.
    """

    first: dict[str, MeasuredSet] = field(default_factory=dict)
    last: dict[str, MeasuredSet] = field(default_factory=dict)


@dataclass(frozen=True)
class RunState:
    """The driver's state after a step, its transfer of weights and its evaluation.

    Args:
        step: steps that were done.
        policy_version: of the weights that the rollout engines serve.
        samples_drawn: ids of samples that were given out, those of evaluations included.
        sampler: `PromptSampler.state_dict()` of the training prompts: whole numbers, and texts.
        updates: optimizer steps of the training steps, skipped ones included.
        steps_without_update: steps in a row whose gradients were not finite.
        first_measured, last_measured: the first and the last measurement of each held-out set, by its name.
        best: the best checkpoint once this one is whole; None where none is the best.
        random: of the driver's generators.
        run: identity of the run that was saved.
        inputs: what identifies the files that the run was given, by the setting that names them.
        groups: groups that were drawn and that no step has trained on; None without any.
        algorithm: what the algorithm's controllers have learned, such as the KL coefficient or the Lagrange multiplier:
            numbers by name, by the name of the controller.
        replay: samples of former steps that the algorithm keeps, in its order; None where it keeps none.
        kept: what was found once of all the data and later steps need, by name.
        evaluation_due: the state is the one before the evaluation of the step, with which a resumed run begins.
    """

    step: _Count
    policy_version: _Count
    samples_drawn: _Count
    sampler: dict[str, int | str]
    updates: _Count
    steps_without_update: _Count
    random: RandomState
    run: str
    inputs: dict[str, str]
    groups: BufferedGroups | None = None
    algorithm: dict[str, dict[str, float]] = field(default_factory=dict)
    replay: SampleBatch | None = None
    first_measured: dict[str, MeasuredSet] = field(default_factory=dict)
    last_measured: dict[str, MeasuredSet] = field(default_factory=dict)
    best: Best | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)
    evaluation_due: bool = False

    @property
    def measurements(self) -> Measurements:
        """The first and the last measurement of each set so far."""
        return Measurements(self.first_measured, self.last_measured)

    def evaluated(self, measurements: Measurements, samples_drawn: int) -> RunState:
        """The state after the evaluation of its step, where that was due.

        Args:
            measurements: with those of the evaluation.
            samples_drawn: with the ids of its responses.
        """
        return replace(
            self,
            samples_drawn=samples_drawn,
            first_measured=measurements.first,
            last_measured=measurements.last,
            evaluation_due=False,
        )

    def write(self, directory: Path) -> list[Path]:
        """Write driver.json, and files for samples and for what else is kept; their paths."""
        names = [attribute.name for attribute in dataclasses.fields(self) if attribute.name not in _IN_FILES]
        document = {name: getattr(self, name) for name in names}
        document["groups"], written = None, [directory / DRIVER]
        if self.replay is not None:
            write_batch(directory / _REPLAY, self.replay)
            document["replay"] = _REPLAY
            written.append(directory / _REPLAY)
        if self.groups is not None:
            kept = ("ledger", "first_samples", "scores", "streamed")
            document["groups"] = {name: getattr(self.groups, name) for name in kept}
            for name, samples in (("ended", self.groups.ended), ("begun", self.groups.begun)):
                if samples is not None:
                    written.append(directory / _GROUPS[name])
                    write_batch(written[-1], samples)
                    document["groups"][name] = _GROUPS[name]
        document["random"] = dataclasses.asdict(self.random)
        document["best"] = dataclasses.asdict(self.best) if self.best is not None else None
        for name in _MEASURED:
            document[name] = {key: dataclasses.asdict(measured) for key, measured in document[name].items()}
        with naming(directory / DRIVER):
            (directory / DRIVER).write_text(json.dumps(document, indent=1) + "\n")
        if self.kept:
            write_tensors(directory / _KEPT, self.kept)
            written.append(directory / _KEPT)
        return written

    @classmethod
    def read(cls, directory: Path) -> RunState:
        """Read what `write` wrote; in a checkpoint of format 1 the algorithm had no state.

        Raises:
            UserError: it is not there, or not what this version writes.
        """
        path = directory / DRIVER
        try:
            document = read_json_object(path, MOST_LIST_BYTES)
            if missing := [name for name in _required(cls, document) if name not in document]:
                raise ValueError(f"it has no {missing[0]}")
            groups = _read_groups(directory, document)
            kept = document.pop("replay", None)
            if kept not in (None, _REPLAY):
                raise ValueError(f"replay: {shortened(repr(kept))}, expected {_REPLAY}")
            replay = read_batch(directory / _REPLAY) if kept is not None else None
            document = {name: fact for name, fact in document.items() if name not in _EARLIER}
            texts = {name: document["sampler"].pop(name) for name in (RATES, RETURNED) if name in document["sampler"]}
            for name, text in texts.items():
                if not isinstance(text, str):
                    raise ValueError(f"sampler.{name}: {shortened(repr(text))}, expected text")
            document = {name: _checked(cls, name, value) for name, value in document.items()}
            check_state(document["sampler"] | texts)
            document["sampler"] |= texts
            _check_random(document["random"])
            samples = {"groups": groups, "replay": replay, "kept": _read_kept(directory / _KEPT)}
            return cls(**document | samples)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        except ValidationError as error:
            reason = first_error(error, error.title)
            raise UserError(f"{path} is not the state of a run's driver: {reason}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = shortened(" ".join(str(error).split()), 300)
            raise UserError(f"{path} is not the state of a run's driver: {reason}") from None


def _required(kind: type, document: Mapping[str, Any]) -> list[str]:
    """The names of what the version that wrote `facts` has written."""
    fields = dataclasses.fields(kind)
    without_default = [
        attribute.name for attribute in fields if attribute.default is MISSING and attribute.default_factory is MISSING
    ]
    return without_default if "buffer" in document else ["groups", *without_default]


def _check_random(state: RandomState) -> None:
    """Raise ValueError for what is no state of the generators."""
    try:
        version, words, gauss = state.python
        random.Random().setstate((version, tuple(words), gauss))
        name, keys, position, has_gauss, cached = state.numpy
        np.random.RandomState().set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        _check_torch_state(base64.b64decode(state.torch))
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ValueError(f"random: {error}") from None


def _check_torch_state(state: bytes) -> None:
    """Check a state of torch's generator as `set_state` does it (ATen's CPUGeneratorImpl.cpp), without torch.

    Raises:
        ValueError: it has another size, or places of random numbers that are not there.
    """
    if len(state) != _TORCH_STATE_BYTES:
        raise ValueError(f"torch: {len(state):,} bytes, expected {_TORCH_STATE_BYTES:,}")
    left, seeded, position = struct.unpack_from("<iiQ", state, 8)  # after the seed
    if not (seeded and 0 < left <= _TORCH_STATE_WORDS and position <= _TORCH_STATE_WORDS):
        raise ValueError("torch: not the state of a Mersenne Twister")


def _read_groups(directory: Path, document: dict[str, Any]) -> BufferedGroups | None:
    """The buffered groups of a checkpoint, whose entries leave `facts`. Raises ValueError for other entries."""
    names: list[str] = document.pop("buffer", [])
    if not all(map(_OLD_BATCH.fullmatch, names)) or len(names) > 1:
        raise ValueError(f"buffer: {shortened(repr(names))}, expected one name such as buffer-00000.safetensors")
    streamed, entry = document.pop("stream", None), document.pop("groups", None)
    if names:
        return BufferedGroups.of_batch(read_batch(directory / names[0]))
    if streamed is not None:
        return _groups_of(directory, "stream", streamed, _OLD_GROUPS)
    return _groups_of(directory, "groups", entry, _GROUPS) if entry is not None else None


def _groups_of(directory: Path, key: str, entry: Any, files: Mapping[str, str]) -> BufferedGroups:
    batches = {}
    for name, file in files.items():
        if (kept := entry.get(name)) not in (None, file):
            raise ValueError(f"{key}.{name}: {shortened(repr(kept))}, expected {file}")
        batches[name] = read_batch(directory / file) if kept is not None else None
    streamed = entry.get("streamed", True)
    if not isinstance(streamed, bool):
        raise ValueError(f"{key}.streamed: {shortened(repr(streamed))}, expected true or false")
    scores = dict(entry.get("scores", {}))
    return BufferedGroups(
        dict(entry["ledger"]), dict(entry["first_samples"]), **batches, scores=scores, streamed=streamed
    )


def _read_kept(path: Path) -> dict[str, Tensor]:
    """Read what is kept of the data; nothing if there is no such file. Raises ValueError for another file."""
    if not path.exists():
        return {}
    check_regular(path)
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from None


def _checked(kind: type, name: str, value: Any) -> Any:
    """Convert a JSON value to the type of a field. Raises ValidationError, titled `name`, for another type."""
    hints = get_type_hints(kind, localns={"Tensor": object}, include_extras=True)
    hints["sampler"] = dict[str, int]  # whose text was taken out
    if name not in hints:
        raise KeyError(name)
    of_dataclass = any(map(dataclasses.is_dataclass, (hints[name], *get_args(hints[name]))))
    config = None if of_dataclass else ConfigDict(strict=True, title=name)
    try:
        return TypeAdapter(hints[name], config=config).validate_python(value)
    except ValidationError as error:
        raise ValidationError.from_exception_data(name, error.errors(include_url=False)) from None  # type: ignore[arg-type]


_PADDED = "pad_token_id"
"""Metadata of files of padded rows, as checkpoints before format 4 have them."""


def write_batch(path: Path, batch: SampleBatch) -> None:
    """Write all columns of a batch."""
    write_tensors(path, batch.columns())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors. Raises EngineError where the disk does not take it."""
    from safetensors.torch import save_file  # imports torch

    # Copies, because the format takes no two tensors of one memory.
    copies = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(copies, path)
    except (SafetensorError, OSError) as error:
        raise EngineError(f"cannot write {path}: {' '.join(str(error).split())}") from None


def read_batch(path: Path) -> SampleBatch:
    """The batch that `write_batch` wrote, or the same samples of a file of padded rows.

    Raises:
        UserError: no such file, or not one of a batch.
    """
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            padded = _PADDED in (file.metadata() or {})
        return SampleBatch.from_padded(columns) if padded else SampleBatch(**columns)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"{path} holds no rollout batch: {' '.join(str(error).split())}") from None
