"""Routes: the experts that each token was given to, as a per-token column.

Row t of the column is of the forward pass whose input was token t, which predicts token t + 1. It has top-k entries for
each layer with experts, layers ascending: entry `layer * topk + index`, with layers counted among those that have
experts. Entries are expert numbers of the HuggingFace model. A layer's entries of a token are used only if none of them
is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.models.sizes import Sizes

_CHECKED_ENTRIES = 1 << 22
"""Entries that are checked at a time, so that a check takes little memory."""


def route_dtype(experts: int) -> torch.dtype:
    """Dtype of routes among so many experts: uint8 where 255 is no expert's number, else int16."""
    return torch.uint8 if experts <= 255 else torch.int16


def missing(dtype: torch.dtype) -> int:
    """Entry of a route that is not known: 255 in uint8, -1 in int16."""
    return 255 if dtype == torch.uint8 else -1


@dataclass(frozen=True)
class RouteFormat:
    """Format of the routes of one model.

    Args:
        layers: numbers of the layers that have experts, from 0, ascending.
        topk: experts of a token.
        experts: of a layer.
    """

    layers: tuple[int, ...]
    topk: int
    experts: int

    @staticmethod
    def of(sizes: Sizes) -> RouteFormat:
        """Format of a model's routes."""
        layers = tuple(layer for layer in range(sizes.layers) if sizes.is_sparse(layer))
        return RouteFormat(layers, sizes.experts_per_token, sizes.experts)

    @property
    def dtype(self) -> torch.dtype:
        return route_dtype(self.experts)

    @property
    def missing(self) -> int:
        """Entry that is not known."""
        return missing(self.dtype)

    @property
    def columns(self) -> int:
        """Entries of a token."""
        return len(self.layers) * self.topk

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's routes."""
        return self.columns * self.dtype.itemsize

    def empty(self, tokens: int) -> Tensor:
        """(tokens, columns) routes, all missing."""
        return torch.full((tokens, self.columns), self.missing, dtype=self.dtype)

    def check(self, routes: Tensor, name: str) -> None:
        """Refuse routes of one sample that are not of this format.

        Args:
            routes: (T, columns), in host memory.
            name: of the sample, for errors.

        Raises:
            UserError: shape, dtype, an expert that the model does not have, or one that is twice in a layer's entries.
        """
        self.check_shape(routes, name)
        self.check_entries(routes, torch.tensor([len(routes)]), lambda _: name)

    def check_shape(self, routes: Tensor, name: str) -> None:
        """Refuse routes of another shape or dtype. Raises UserError."""
        if routes.dim() != 2 or routes.shape[1] != self.columns or routes.dtype != self.dtype:
            raise UserError(
                f"{name}: routes have shape {tuple(routes.shape)} and dtype {routes.dtype}, expected (tokens, "
                f"{self.columns}) of {self.dtype}: {len(self.layers)} layers with {self.topk} experts for each token"
            )

    def check_entries(self, routes: Tensor, lengths: Tensor, name: Callable[[int], str]) -> None:
        """Refuse experts that the model does not have, and experts that are twice in a layer's entries.

        Args:
            routes: (T, columns) of N samples end to end.
            lengths: (N,) tokens of each.
            name: of a sample by its number, for errors.

        Raises:
            UserError: names the sample.
        """
        rows = max(1, _CHECKED_ENTRIES // max(1, self.columns))
        for start in range(0, len(routes), rows):
            entries = routes[start : start + rows].unflatten(1, (len(self.layers), self.topk))
            if (problem := self._problem(entries)) is None:
                continue
            token, layer, message = problem
            ends = lengths.cumsum(0)
            sample = int(torch.searchsorted(ends, start + token, right=True))
            token += start - int(ends[sample] - lengths[sample])
            raise UserError(f"{name(sample)}: routes of token {token}, layer {self.layers[layer]} {message}")

    def _problem(self, routes: Tensor) -> tuple[int, int, str] | None:
        """Row, layer's index and message of the first entry of (T, layers, k) that is refused."""
        known = routes != self.missing
        outside = known & ((routes < 0) | (routes >= self.experts))
        if outside.any():
            token, layer, index = outside.nonzero()[0].tolist()
            expert = int(routes[token, layer, index])
            return token, layer, f"name expert {expert}, expected 0 to {self.experts - 1}"
        for index in range(1, self.topk):  # sorting would make 8 bytes of each entry
            twice = (routes[..., :index] == routes[..., index, None]) & known[..., :index]
            if twice.any():
                token, layer, _ = twice.nonzero()[0].tolist()
                expert = int(routes[token, layer, index])
                return token, layer, f"name expert {expert} twice, expected {self.topk} different ones"
        return None
