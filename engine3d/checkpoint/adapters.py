"""Adapters of a checkpoint as files: a directory of PEFT, or merged into the model that they belong to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from engine3d.checkpoint.hf import MODEL, Exported, RoleWeights, export_checkpoint, fp8_settings
from engine3d.checkpoint.manifest import RoleSummary, StoredAdapters, read_complete
from engine3d.checkpoint.metadata import stored_spec
from engine3d.checkpoint.reading.verify import check_described
from engine3d.durable import bring_to_disk
from engine3d.errors import EngineError, UserError
from engine3d.models import check_weights, load_model_spec
from engine3d.models.files.multi_token import KeptTensors
from engine3d.models.files.safetensors_files import ExportFiles, TensorFiles
from engine3d.models.files.weights import begin_export, finish_export, plan_model_export, write_index
from engine3d.models.lora.peft_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BASE, PREFIX, peft_config
from engine3d.models.lora.spec import A, AdapterSpec, B, module_name
from engine3d.models.precision import Precision, check_experts, stored_tensors
from engine3d.models.rules import HFTensor
from engine3d.startup.lazy_imports import torch

_INITIAL = "initial"
"""The folder of a run with a model that the recipe made."""


def export_adapter(checkpoint: Path, out: Path, *, role: str = "actor", verify: bool = True) -> Exported:
    """Write the adapters of a checkpoint as a directory that PEFT and transformers load.

    Args:
        checkpoint: the directory of one step.
        out: where to write; must not exist.
        role: whose adapters.
        verify: false exports what is there, whatever the checksums say.

    Raises:
        UserError: the checkpoint has no adapters or is damaged, or `out` exists.
        EngineError: writing failed.
    """
    from safetensors.torch import save_file

    spec, adapters, summary, saved, base = _opened(checkpoint, role, verify=verify)
    dtype = getattr(torch, summary.dtype)
    partial = out.with_name(f".{out.name}.partial")
    try:
        begin_export(out, partial)
        tensors = {
            PREFIX + name: saved.complete(tensor)[2].to(dtype).contiguous() for name, tensor in spec.hf_tensors.items()
        }
        config = peft_config(adapters.rank, adapters.alpha, adapters.targets) | {"base_model_name_or_path": str(base)}
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt", BASE: adapters.base})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        for path in (*partial.iterdir(), partial):
            bring_to_disk(path)
        partial.rename(out)
    except OSError as error:
        raise EngineError(f"export: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(summary.dtype, sum(tensor.nbytes for tensor in tensors.values()))


def export_actor(
    checkpoint: Path,
    out: Path,
    base: Path | None = None,
    *,
    dtype: str,
    precision: Precision | None = None,
    verify: bool = True,
    multi_token: bool = True,
) -> Exported:
    """Write the actor of a checkpoint, with its adapters merged if it has any.

    Args:
        checkpoint: the directory of one step.
        out: where to write; must not exist.
        base: HuggingFace directory of the run's model, where it is now; None for where it was.
        dtype: of the written tensors; with adapters they have that of the run.
        precision: see `export_checkpoint`.
        verify: false exports what is there, whatever the checksums say.
        multi_token: False to leave out layers for multi-token prediction, as for engines.

    Raises:
        UserError, EngineError: as `export_checkpoint` and `export_merged`.
    """
    if read_complete(checkpoint).roles["actor"].adapters is None:
        return export_checkpoint(
            checkpoint,
            out,
            dtype=dtype,
            precision=precision,
            verify=verify,
            multi_token=multi_token,
            model_of_run=base,
        )
    return export_merged(checkpoint, out, base, precision=precision, verify=verify, multi_token=multi_token)


def export_merged(
    checkpoint: Path,
    out: Path,
    base: Path | None = None,
    *,
    role: str = "actor",
    precision: Precision | None = None,
    verify: bool = True,
    multi_token: bool = True,
) -> Exported:
    """Write a model with the adapters of a checkpoint merged, W + alpha / rank * B A, as engines get it.

    One weight is in memory at a time, and all adapters of the checkpoint.

    Args:
        checkpoint: the directory of one step.
        out: where to write; must not exist.
        base: HuggingFace directory of the model; None for that of the run.
        role: whose adapters.
        precision: see `export_checkpoint`.
        verify: false exports what is there, whatever the checksums say.
        multi_token: False to leave out layers for multi-token prediction.

    Raises:
        UserError: as `export_adapter`; or `base` is not the model that the adapters belong to.
        EngineError: writing failed.
    """
    spec, adapters, summary, saved, of_run = _opened(checkpoint, role, verify=verify)
    base = base or of_run
    model = load_model_spec(base)
    check_weights(model, base)
    dtype = getattr(torch, summary.dtype)
    if precision is not None:
        model = fp8_settings(read_complete(checkpoint), role).applied(model)
        check_experts(model)
    further = KeptTensors(model, base, dtype, precision, multi_token=multi_token)
    plan = plan_model_export(model, dtype, 5e9, precision, further)
    partial = out.with_name(f".{out.name}.partial")
    files = ExportFiles(plan, partial)
    try:
        with TensorFiles(base) as stored:
            if (fingerprint := stored.fingerprint()) != adapters.base:
                raise UserError(
                    f"export: {base} is not the model of the adapters of {checkpoint} ({fingerprint}, expected "
                    f"{adapters.base}); expected --base of that model"
                )
            begin_export(out, partial)
            files.create()
            for name, tensor in model.hf_tensors.items():
                box = tuple((0, size) for size in tensor.shape)
                values = stored.read(name, box).to(torch.float32 if tensor.buffer else dtype)
                for quantised in stored_tensors(tensor, box, _merged(values, name, spec, saved), dtype, precision):
                    files.write(*quantised)
            for of_layers in further.read():
                files.write(*of_layers)
        files.close()
        write_index(plan, partial)
        finish_export(model, dtype, partial, out, precision, further)
    except OSError as error:
        raise EngineError(f"export: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    of_dtype = f"{precision} and {summary.dtype}" if precision else summary.dtype
    return Exported(of_dtype, sum(file.size for file in plan.files))


def _opened(
    checkpoint: Path, role: str, *, verify: bool
) -> tuple[AdapterSpec, StoredAdapters, RoleSummary, RoleWeights, Path]:
    """The adapters' specification, how they are stored, the role, its tensors, and the run's model."""
    manifest = read_complete(checkpoint)
    if role not in manifest.roles:
        raise UserError(f"export: {checkpoint} has no role {role}; expected one of {', '.join(sorted(manifest.roles))}")
    summary = manifest.roles[role]
    if summary.adapters is None:
        raise UserError(f"export: {checkpoint} has weights of a model and no adapters; expected neither option")
    if verify:
        check_described(checkpoint, role)
    spec = stored_spec(checkpoint / MODEL, summary)
    assert isinstance(spec, AdapterSpec)
    saved = RoleWeights(checkpoint, manifest, role, verify=verify)
    saved.check(spec, MODEL)
    given = manifest.recipe.get("model", {}).get("path")
    return spec, summary.adapters, summary, saved, Path(given) if given else checkpoint.parent.parent / _INITIAL


def _merged(values: torch.Tensor, name: str, spec: AdapterSpec, saved: RoleWeights) -> torch.Tensor:
    """A weight with its adapter, if it has one."""
    factors: list[HFTensor] = []
    for kind in (B, A):
        tensor = spec.hf_tensors.get(f"{module_name(name)}.{kind}.weight")
        if tensor is not None and name.endswith(".weight"):
            factors.append(tensor)
    if not factors:
        return values
    second, first = (saved.complete(tensor)[2].to(values.dtype).float() for tensor in factors)
    return (values.float() + spec.lora.scale * (second @ first)).to(values.dtype)
