"""Routes as a per-token column: their format, and what is refused."""

from __future__ import annotations

import pytest
import torch

from engine3d.errors import UserError
from engine3d.models.experts.routes import RouteFormat, missing, route_dtype


@pytest.mark.parametrize(("experts", "dtype", "unknown"), [(255, torch.uint8, 255), (256, torch.int16, -1)])
def test_the_smallest_dtype_that_has_a_number_for_missing(experts: int, dtype: torch.dtype, unknown: int) -> None:
    routes = RouteFormat((1, 3), topk=2, experts=experts)
    assert routes.dtype == route_dtype(experts) == dtype
    assert routes.missing == missing(dtype) == unknown
    assert routes.token_bytes == 4 * dtype.itemsize
    empty = routes.empty(3)
    assert empty.shape == (3, 4) and bool((empty == unknown).all())
    routes.check(empty, "sample 7")


def test_routes_of_several_chunks_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine3d.models.experts.routes._CHECKED_ENTRIES", 8)
    routes = RouteFormat((1, 3), topk=2, experts=8)
    rows = torch.tensor([[0, 1, 2, 3], [7, 255, 255, 255], [4, 5, 6, 7]] * 3, dtype=torch.uint8)
    routes.check(rows, "sample 7")
    rows[5, 2] = 8
    with pytest.raises(UserError, match=r"^sample 7: routes of token 5, layer 3 name expert 8, expected 0 to 7$"):
        routes.check(rows, "sample 7")
    rows[5, 2] = 7
    with pytest.raises(UserError, match=r"^sample 7: routes of token 5, layer 3 name expert 7 twice, expected 2 diff"):
        routes.check(rows, "sample 7")


def test_negative_experts_are_refused() -> None:
    routes = RouteFormat((0,), topk=2, experts=300)
    with pytest.raises(UserError, match="layer 0 name expert -2, expected 0 to 299"):
        routes.check(torch.tensor([[0, -2]], dtype=torch.int16), "sample 7")


@pytest.mark.parametrize("rows", [torch.zeros(2, 3, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int32)])
def test_another_shape_or_dtype_is_refused(rows: torch.Tensor) -> None:
    routes = RouteFormat((1, 3), topk=2, experts=8)
    with pytest.raises(UserError, match=r"expected \(tokens, 4\) of torch.uint8: 2 layers with 2 experts"):
        routes.check(rows, "sample 7")
