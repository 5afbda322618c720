"""Routes in a run's sample store, checked against the run's model."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from engine3d.errors import UserError
from engine3d.models import load_model_spec, model_spec
from engine3d.models.experts.routes import RouteFormat
from hybridflow.batch.sample_table import batch_of
from hybridflow.rundir.kept_recipe import kept_setting, read_kept_recipe


def route_format(run: Path) -> RouteFormat:
    """Return the format of the routes of a run's model.

    Raises:
        UserError: the model cannot be read, or has no experts.
    """
    recipe = read_kept_recipe(run)
    path = kept_setting(recipe, "model.path")
    config = kept_setting(recipe, "model.create.config")
    if path is None and config is None:
        raise UserError(f"{run}: its recipe names no model")
    spec = model_spec(config) if path is None else load_model_spec(Path(path))
    if not spec.sizes.experts:
        raise UserError(f"{run}: {spec.family.architecture} has no experts, expected a model with routes")
    return RouteFormat.of(spec.sizes)


def checked_routes(path: Path, step: int, format: RouteFormat) -> str:
    """Check the routes of a step's samples, and return a line with their size and the share that is missing.

    Args:
        path: of the step's file.
        step: its number.
        format: of the model's routes.

    Raises:
        UserError: names the first sample with an expert that the model does not have, or twice in a layer, or with
            another number of experts for each token; or the file has no routes, or cannot be read.
    """
    samples = tokens = missing = nbytes = 0
    try:
        file = pq.ParquetFile(path, memory_map=False)
        for number in range(file.num_row_groups):
            batch = batch_of(file.read_row_group(number))
            if batch.routes is None:
                raise UserError(f"step {step} has no routes, expected those of a run with rollout.engine.routes=true")
            of_samples = batch.routes.split(batch.sequence_lengths.tolist())
            for sample, routes in zip(batch.sample_ids.tolist(), of_samples, strict=True):
                format.check(routes, f"step {step}, sample {sample}")
            samples, tokens = samples + len(batch), tokens + len(batch.routes) - len(batch)
            missing, nbytes = missing + int(batch.missing_routes.sum()), nbytes + batch.routes.nbytes
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} holds no samples that can be read: {error}") from None
    share = missing / tokens if tokens else 0.0
    return (
        f"step {step}  {samples:,} samples  {tokens:,} tokens with routes of {len(format.layers)} layers x "
        f"{format.topk} experts, {share:.2%} missing  {nbytes / 1e6:,.2f} MB"
    )
