"""Rotary position embeddings: the frequencies that a HuggingFace config asks for.

Megatron-Core's own scaling has Llama 3.1's constants built in, so the frequencies are computed here from the config and
given to its module. In latent attention, where each layer has its own module, Megatron-Core computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from engine3d.errors import UserError
from engine3d.models.files.hf_config import HFConfig
from engine3d.startup.lazy_imports import torch

KINDS = ("default", "linear", "llama3", "yarn")

_OF_BATCHES = {
    "dynamic": "transformers computes its frequencies from the longest sequence of a batch, and SGLang from the config",
    "longrope": "its frequencies change where a batch has a sequence beyond original_max_position_embeddings, and "
    "batches of trainer and engine differ",
}
"""Kinds that make a token's log-prob depend on the other sequences of a batch, and the reason."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings of a model.

    Args:
        base: the base of the frequencies, HuggingFace's rope_theta.
        kind: HuggingFace's rope_type, one of KINDS.
        rotary_share: share of each query and key head that turns with the position: its first elements.
        factor: by which low frequencies (all of them for "linear") are divided.
        low_frequency_factor: "llama3": wavelengths longer than original_positions / this are divided.
        high_frequency_factor: "llama3": wavelengths shorter than original_positions / this are kept.
        original_positions: "llama3" and "yarn": sequence length before the extension, in tokens.
        beta_fast: "yarn": frequencies with more turns than this over the original positions are kept.
        beta_slow: "yarn": those with fewer turns than this are divided.
        truncate: "yarn": the bounds between kept and divided frequencies are whole numbers.
        mscale: "yarn": sine and cosine are multiplied by m(mscale) / m(mscale_all_dim), where
            m(x) = 0.1 * x * ln(factor) + 1.
        mscale_all_dim: "yarn" in latent attention: scores are multiplied by m(mscale_all_dim) squared.
    """

    base: float
    kind: str = "default"
    rotary_share: float = 1.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians a position for each pair of elements that turns: float32 [rotary_share * head_dim / 2] on the CPU.

        "llama3" is the interpolation of the Llama 3.1 release: smooth between the two wavelength limits. "yarn" is
        linear between two pairs of elements (https://arxiv.org/abs/2309.00071).
        """
        head_dim = int(head_dim * self.rotary_share)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        frequencies = 1.0 / self.base**exponents
        if self.kind == "default":
            return frequencies
        if self.kind == "linear":
            return frequencies / self.factor
        turns = self.original_positions * frequencies / (2 * math.pi)
        if self.kind == "yarn":
            first, last = self._divided_from(self.beta_fast, head_dim), self._divided_from(self.beta_slow, head_dim)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
            divided = ((pairs - first) / (last - first or 0.001)).clamp(0.0, 1.0)
            return frequencies / self.factor * divided + frequencies * (1.0 - divided)
        span = self.high_frequency_factor - self.low_frequency_factor
        keep = ((turns - self.low_frequency_factor) / span).clamp(0.0, 1.0)
        return (1.0 - keep) * frequencies / self.factor + keep * frequencies

    @property
    def score_factor(self) -> float:
        """Factor of attention scores, where sine and cosine are not scaled themselves.

        Queries and keys that turn with all their elements both have the scale. Not for latent attention.
        """
        if self.kind != "yarn":
            return 1.0
        return (_magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)) ** 2

    def _divided_from(self, turns: float, head_dim: int) -> float:
        """The pair of elements, as a fraction, that turns so often over the original positions."""
        return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.base))


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def read_rope(
    config: HFConfig, kinds: tuple[str, ...] = KINDS, base: float = 10000.0, rotary_share: float = 1.0
) -> Rope:
    """The rotary embeddings of a HuggingFace config, in the form of transformers 5 or of its predecessors.

    Args:
        config: the HuggingFace config.
        kinds: those that the architecture may have here.
        base: of the frequencies where the config has none.
        rotary_share: share of a head that turns where the config says none; 1.0 allows no other.

    Raises:
        UserError: a kind of scaling that is not supported, one of its values is missing or not a number, or the two
            forms say different things.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # which transformers drops for the other
    values: Any = config.get(key, {})
    if config.get("rope_parameters", values) not in (values, {}):
        raise config.error("rope_parameters", "the same as rope_scaling, or only one of them")
    if not isinstance(values, dict):
        raise config.error(key, "an object with rope_type")
    nested = HFConfig(values, f"{config.source}: {key}")
    base = nested.number("rope_theta", config.number("rope_theta", base))
    share = config.number("partial_rotary_factor", rotary_share, null=rotary_share)
    share = nested.number("partial_rotary_factor", share, null=share)
    if share > 1.0 or (share != rotary_share == 1.0):
        expected = "at most 1.0" if rotary_share != 1.0 else "1.0, which is the only one supported"
        raise UserError(f"{config.source}: partial_rotary_factor: expected {expected}")
    kind = nested.get("rope_type", nested.get("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        reason = f" ({kind}: {_OF_BATCHES[kind]})" if isinstance(kind, str) and kind in _OF_BATCHES else ""
        accepted = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        raise config.error(key, f"rope_type {accepted}{reason}")
    if kind == "default":
        return Rope(base, rotary_share=share)
    if kind == "linear":
        return Rope(base, kind, share, nested.number("factor"))
    original = "original_max_position_embeddings"
    if config.get(original, nested.get(original)) != nested.get(original):  # which transformers puts in its place
        raise config.error(original, f"the {original} of {key}, or nothing")
    if kind == "yarn":
        return _read_yarn(nested, base)
    low, high = nested.number("low_freq_factor"), nested.number("high_freq_factor")
    if high <= low:
        raise nested.error("high_freq_factor", f"a number above low_freq_factor={low}")
    return Rope(base, kind, share, nested.number("factor"), low, high, nested.integer(original))


def _read_yarn(values: HFConfig, base: float) -> Rope:
    # With only one of the two, transformers and SGLang compute different models.
    if (values.get("mscale") is None) != (values.get("mscale_all_dim") is None):
        raise values.error("mscale_all_dim", "a number above 0 beside mscale, or neither")
    values.require("attention_factor", (None,))  # which SGLang passes over
    scaled = values.get("mscale") is not None
    return Rope(
        base,
        "yarn",
        factor=values.number("factor"),
        original_positions=values.integer("original_max_position_embeddings"),
        beta_fast=values.number("beta_fast", 32.0, null=32.0),
        beta_slow=values.number("beta_slow", 1.0, null=1.0),
        truncate=values.flag("truncate", True),
        mscale=values.number("mscale") if scaled else 1.0,
        mscale_all_dim=values.number("mscale_all_dim") if scaled else 0.0,
    )
