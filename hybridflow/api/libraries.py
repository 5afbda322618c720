"""Availability of optional libraries."""

from __future__ import annotations

from engine3d.platform import platform


def is_flash_attn_available() -> bool:
    """True if FlashAttention is installed for this Python."""
    return platform.libraries()["flash-attn"] != "absent"
