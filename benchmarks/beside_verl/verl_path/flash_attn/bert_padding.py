"""Functions of FlashAttention 2's module of this name, in verl's torch versions."""

from verl.utils.attention_utils import _fallback_index_first_axis as index_first_axis
from verl.utils.attention_utils import _fallback_pad_input as pad_input
from verl.utils.attention_utils import _fallback_rearrange as rearrange
from verl.utils.attention_utils import _fallback_unpad_input as unpad_input

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]
