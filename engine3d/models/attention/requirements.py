"""Which models can have queries and keys made in one step."""

from __future__ import annotations

from engine3d.errors import UserError
from engine3d.models.family import ModelSpec


def check_fused_query_key(spec: ModelSpec, *, tp: int, cp: int) -> None:
    """Refuse a model whose queries and keys `normed_and_rotated` does not make, or a layout that cuts them further.

    Raises:
        UserError: names the setting, and the model or its size.
    """
    sizes, setting, model = spec.sizes, "fused_query_key=true", spec.family.architecture
    otherwise = "expected false; a model beside the actor may have a train of its own"
    if sizes.latent is not None:
        raise UserError(f"{setting}: {model} has latent attention; {otherwise}")
    if not sizes.qk_norm:
        raise UserError(f"{setting}: {model} has no norms of queries and keys; {otherwise}")
    if sizes.head_dim.bit_count() > 1:
        raise UserError(f"{setting}: head_dim={sizes.head_dim} is no power of two, as the kernels need; {otherwise}")
    if tp > sizes.groups:
        raise UserError(
            f"{setting} with tp={tp}: expected at most num_key_value_heads={sizes.groups}, or false: ranks "
            "that share a key have only some of its queries"
        )
    if cp > 1:
        raise UserError(f"{setting} with cp={cp}: expected cp=1, or false")
