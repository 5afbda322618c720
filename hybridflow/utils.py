"""Names of `hybridflow` where guides import them: `is_flash_attn_available`, and `config` with `get_ppo_config`."""

from __future__ import annotations

import sys

from hybridflow.api import config
from hybridflow.api.libraries import is_flash_attn_available

__all__ = ["config", "is_flash_attn_available"]

sys.modules[f"{__name__}.config"] = config
__path__: list[str] = []
"""Names of guides below `hybridflow.utils`: `hybridflow` says what they are here."""
