"""transformers' models whose tokens are given to experts by routes, as a reference for routing replay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_OF_MIXTRAL = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Names of files, by those of the model."""


@dataclass
class RoutedReference:
    """A model of transformers, one sample at a time.

    Args:
        model: with experts, in float32.

    Attributes:
        chosen: by layer, (t, k) experts that the router chose for the tokens since the last `routed`.
    """

    model: Any
    chosen: dict[int, Tensor] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        return [number for number, layer in enumerate(self.model.model.layers) if hasattr(layer.mlp, "experts")]

    @property
    def experts(self) -> int:
        keys = {"deepseek_v3": "n_routed_experts", "glm4_moe": "n_routed_experts", "mixtral": "num_local_experts"}
        return int(getattr(self.model.config, keys.get(self.model.config.model_type, "num_experts")))

    @contextmanager
    def routed(self, routes: Tensor | None) -> Iterator[None]:
        """Give the tokens of the next sample to experts by (t, layers * k) routes; missing ones are the router's."""
        self.chosen, hooks = {}, []
        for index, number in enumerate(self.layers):
            mlp = self.model.model.layers[number].mlp

            def route(_: Any, arguments: Any, index: int = index, number: int = number, mlp: Any = mlp) -> Any:
                hidden, live, weights = arguments
                self.chosen[number] = live
                if routes is None:
                    return arguments
                most = live.shape[1]
                given = routes[:, index * most : (index + 1) * most].long()
                known = ((given >= 0) & (given < self.experts)).all(dim=1, keepdim=True)
                experts = given.where(known, live)
                return hidden, experts, self._weights(mlp, hidden, experts).to(weights.dtype)

            hooks.append(mlp.experts.register_forward_pre_hook(route))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _weights(self, mlp: Any, hidden: Tensor, experts: Tensor) -> Tensor:
        """(t, k) gating weights of these experts, from the live logits."""
        config, logits = self.model.config, hidden.float() @ mlp.gate.weight.float().T
        if config.model_type in ("deepseek_v3", "glm4_moe"):
            weights = logits.sigmoid().gather(1, experts)
            return config.routed_scaling_factor * weights / weights.sum(dim=-1, keepdim=True)
        weights = logits.softmax(dim=-1).gather(1, experts)
        normed = config.model_type == "mixtral" or config.norm_topk_prob
        return weights / weights.sum(dim=-1, keepdim=True) if normed else weights

    def logprobs(self, sample: list[int], routes: Tensor | None = None) -> Tensor:
        """(t,) log-probs of a sample's tokens, 0 for the first."""
        tokens = torch.tensor([sample])
        with self.routed(routes):
            every = self.model(tokens).logits.float().log_softmax(dim=-1)
        return torch.cat([torch.zeros(1), every[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]])

    def live_routes(self) -> Tensor:
        """(t, layers * k) experts that the routers chose for the last sample."""
        return torch.cat([self.chosen[number] for number in self.layers], dim=1)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by name, those of each expert apart, and reset them."""
        by_name: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is None:
                continue
            gradient, parameter.grad = parameter.grad, None
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                by_name[name.replace(".default.", ".")] = gradient  # of peft's adapters
                continue
            prefix, kind = name.rsplit(".", 1)
            for expert, rows in enumerate(gradient):
                named = {"down_proj": rows}
                if kind == "gate_up_proj":
                    named = dict(zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True))
                by_name |= {f"{prefix}.{expert}.{projection}.weight": value for projection, value in named.items()}
        if self.model.config.model_type == "mixtral":
            return {
                re.sub("|".join(_OF_MIXTRAL), lambda match: _OF_MIXTRAL[match[0]], name): gradient
                for name, gradient in by_name.items()
            }
        return by_name
