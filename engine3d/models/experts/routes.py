"""Routes: the experts that each token was given to, as a per-token column.

Row t of the column is of the forward pass whose input was token t, which predicts token t + 1. It has top-k entries for
each layer with experts, layers ascending: entry `layer * topk + index`, with layers counted among those that have
experts. Entries are expert numbers of the HuggingFace model. A layer's entries of a token are used only if none of them
is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine3d.errors import UserError
from engine3d.models.sizes import Sizes

_CHECKED_ENTRIES = 1 << 22
"""Entries that are checked at a time, so that a check takes little memory."""


def route_dtype(experts: int) -> torch.dtype:
    """Dtype of routes among this many experts: uint8 where 255 is no expert's number, else int16."""
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

    def no_routes(self, lengths: Tensor) -> TokenRoutes:
        """Routes of samples of (N,) lengths, all missing, which take no memory."""
        missing_row = self.empty(1).numpy()
        return TokenRoutes(tuple(np.broadcast_to(missing_row, (length, self.columns)) for length in lengths.tolist()))

    def check(self, routes: Tensor, name: str) -> None:
        """Refuse routes of one sample that are not of this format.

        Args:
            routes: (T, columns), in host memory.
            name: of the sample, for errors.

        Raises:
            UserError: shape, dtype, an expert that the model does not have, or one that is twice in a layer's entries.
        """
        self.check_shape(tuple(routes.shape), routes.dtype, name)
        self.check_entries(routes, lambda token: (name, token))

    def check_shape(self, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
        """Refuse routes of another shape or dtype. Raises UserError."""
        if shape[1:] != (self.columns,) or dtype != self.dtype:
            raise UserError(
                f"{name}: routes have shape {shape} and dtype {dtype}, expected (tokens, "
                f"{self.columns}) of {self.dtype}: {len(self.layers)} layers with {self.topk} experts for each token"
            )

    def check_entries(self, routes: Tensor, locate: Callable[[int], tuple[str, int]]) -> None:
        """Refuse experts that the model does not have, and experts that are twice in a layer's entries.

        Args:
            routes: (t, columns) of some tokens.
            locate: return the name of a row's sample, and the number of its token there, for errors.

        Raises:
            UserError: names the sample.
        """
        rows = max(1, _CHECKED_ENTRIES // max(1, self.columns))
        for start in range(0, len(routes), rows):
            entries = routes[start : start + rows].unflatten(1, (len(self.layers), self.topk))
            if (problem := self._problem(entries)) is None:
                continue
            row, layer, message = problem
            name, token = locate(start + row)
            raise UserError(f"{name}: routes of token {token}, layer {self.layers[layer]} {message}")

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


@dataclass(frozen=True, eq=False)
class TokenRoutes:
    """Routes of the T tokens of N samples, which stay where they are stored. A rank reads the entries that it needs.

    Args:
        samples: (t, C) uint8 or int16 of each sample, in memory that several processes may share.
        ignored: (T,) bool, True for tokens whose routes are read as missing; None ignores no route.
    """

    samples: tuple[np.ndarray[Any, Any], ...]
    ignored: np.ndarray[Any, Any] | None = None

    @staticmethod
    def of(routes: Tensor, lengths: Tensor) -> TokenRoutes:
        """Split (T, C) routes, in host memory, of samples of (N,) lengths that are end to end."""
        return TokenRoutes(tuple(rows.numpy() for rows in routes.split(lengths.tolist())))

    def locate(self, token: int) -> tuple[int, int]:
        """Return the sample of one of the T tokens, and its number there."""
        sample = int(np.searchsorted(self._ends, token, side="right"))
        return sample, token - int(self._ends[sample]) + len(self.samples[sample])

    def read(self, tokens: Tensor, columns: Tensor) -> Tensor:
        """Copy some entries.

        Args:
            tokens: (n,) int64 numbers among the T tokens; -1 for none.
            columns: (c,) int64.

        Returns:
            (n, c) routes, those of -1 and of ignored tokens missing.
        """
        dtype = self.samples[0].dtype
        routes = np.full((len(tokens), len(columns)), missing(getattr(torch, dtype.name)), dtype)
        real = np.flatnonzero(tokens.numpy() >= 0)
        flat, of_rank = tokens.numpy()[real], columns.numpy()
        samples = np.searchsorted(self._ends, flat, side="right")
        # Tokens of a sequence are in a few runs of consecutive ones.
        bounds = np.flatnonzero((np.diff(flat, prepend=-2) != 1) | (np.diff(samples, prepend=-1) != 0))
        for begin, end in pairwise([*bounds.tolist(), len(flat)]):
            sample, first = self.locate(int(flat[begin]))
            routes[real[begin:end]] = self.samples[sample][first : first + end - begin].take(of_rank, axis=1)
        if self.ignored is not None:
            routes[real[self.ignored[flat]]] = missing(getattr(torch, dtype.name))
        return torch.from_numpy(routes)

    @cached_property
    def _ends(self) -> np.ndarray[Any, Any]:
        """(N,) int64: number of the token after each sample's last."""
        return np.cumsum([len(rows) for rows in self.samples], dtype=np.int64)
