"""Where guides import `is_flash_attn_available` from; it is `hybridflow.is_flash_attn_available`."""

from __future__ import annotations

from hybridflow.api.libraries import is_flash_attn_available

__all__ = ["is_flash_attn_available"]
