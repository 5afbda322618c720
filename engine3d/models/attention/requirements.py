"""Requirements of fused queries and keys, and of FlashAttention."""

from __future__ import annotations

from engine3d.errors import UserError
from engine3d.models.family import ModelSpec
from engine3d.platform import distribution_version, platform

FLASH_ATTENTION = ("flash-attn-4", "nvidia-cutlass-dsl")
"""The packages that Transformer Engine takes FlashAttention 4 from. SGLang needs them as well."""
_HEAD_DIMS = (64, 128)


def check_fused_query_key(spec: ModelSpec, *, tp: int) -> None:
    """Refuse a model whose queries and keys `normed_and_rotated` does not make, or a layout that cuts them further.

    Raises:
        UserError: names the setting, and the model or its size.
    """
    sizes, setting, model = spec.sizes, "fused_query_key=true", spec.family.architecture
    otherwise = "expected false; a model beside the actor may have a train of its own"
    if sizes.latent is not None:
        raise UserError(f"{setting}: {model} has latent attention; {otherwise}")
    if not sizes.qk_norm:
        raise UserError(f"{setting}: {model} has no norms of single query and key heads; {otherwise}")
    if sizes.head_dim.bit_count() > 1:
        raise UserError(f"{setting}: head_dim={sizes.head_dim} is no power of two, as the kernels need; {otherwise}")
    if spec.rope.rotary_share != 1.0:
        raise UserError(f"{setting}: {model} turns {spec.rope.rotary_share:g} of a head; {otherwise}")
    if tp > sizes.groups:
        raise UserError(
            f"{setting} with tp={tp}: expected at most num_key_value_heads={sizes.groups}, or false: ranks "
            "that share a key have only some of its queries"
        )


def check_flash_attention(spec: ModelSpec, *, dtype: str, packing: bool, deterministic: bool) -> None:
    """Refuse a model, or settings of its trainer, that FlashAttention 4 was not tried with, and an environment without.

    Args:
        spec: the model.
        dtype: of the trainer.
        packing: whether sequences lie end to end.
        deterministic: whether every run has to make the same bits.

    Raises:
        UserError: names the setting, and the model, its size or the package.
    """
    sizes, setting = spec.sizes, "megatron.attention_backend=flash"
    if sizes.latent is not None or sizes.sinks:
        kind = "attention sinks" if sizes.sinks else "latent attention"
        raise UserError(f"{setting}: {spec.family.architecture} has {kind}; expected auto")
    if sizes.head_dim not in _HEAD_DIMS:
        raise UserError(f"{setting}: head_dim={sizes.head_dim}, expected {' or '.join(map(str, _HEAD_DIMS))}, or auto")
    if dtype != "bfloat16":
        raise UserError(f"{setting} with dtype={dtype}: expected bfloat16, or auto")
    if not packing:
        raise UserError(f"{setting} with packing=false: expected packing=true, or auto")
    if deterministic:
        raise UserError(f"{setting} with deterministic=true: expected false, or auto")
    for package in FLASH_ATTENTION if platform.has_transformer_engine else ():
        if distribution_version(package) == "absent":
            raise UserError(f"{setting} needs {package}, which is absent here: pip install -r requirements.txt")
