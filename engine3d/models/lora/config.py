"""Settings of low-rank adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from engine3d.settings import Settings

_ATTENTION = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "out_proj")
)


class LoraConfig(Settings):
    """Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): they alone are trained, the model stays as it is.

    A linear layer's output is W x + alpha / rank * B A x. A has `rank` rows, B as many columns. B starts at 0. Each
    expert has adapters of its own. Routers, embedding and output layer have none.
    """

    rank: int = Field(16, ge=1, le=4096, description="rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, le=1e6, description="alpha / rank scales the output of an adapter")
    targets: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="linear layers with adapters, by the last name of HuggingFace's modules, such as q_proj; null: all "
        "of attention, MLP and experts",
    )
    path: Path | None = Field(
        None,
        description="a directory of PEFT whose adapters training starts from; null starts from new ones. The reference "
        "is the model without them",
    )
    engine: Literal["merged", "adapter"] = Field(
        "merged",
        description="weights of the rollout engines: merged with the adapters for each version; or the model once and "
        "the adapters alone for each version, which SGLang adds by its own LoRA (on CPUs)",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of an adapter's input; only 0 is supported")

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        return self.alpha / self.rank

    @property
    def adapts_mlps(self) -> bool:
        """True if MLPs or experts have adapters."""
        return self.targets is None or not _ATTENTION.issuperset(self.targets)
