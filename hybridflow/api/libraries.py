"""Which libraries there are."""

from __future__ import annotations

from engine3d.platform import platform


def is_flash_attn_available() -> bool:
    """Whether FlashAttention is installed for this Python."""
    return platform.libraries()["flash-attn"] != "absent"
