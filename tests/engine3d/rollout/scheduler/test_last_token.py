"""A token that ends a response ends it, also where it is cut or aborted with that token: of SGLang's own requests."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from engine3d.rollout.scheduler.text_stops import updated_with_last_token

STOP = 9


def reason(tokens: list[int], *, aborted: bool, longest: int = 8, status: int | None = None) -> str:
    """Finish reason of SGLang for a response of these tokens."""
    from http import HTTPStatus

    from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=longest, stop_token_ids=[STOP])
    sampling.normalize(None)
    request: Any = Req("response", "", array("q", [1, 2]), sampling, vocab_size=100)
    request.output_ids.extend(tokens)
    if aborted:
        request.to_finish = FINISH_ABORT("", HTTPStatus(status)) if status is not None else FINISH_ABORT()
    updated_with_last_token(Req.update_finish_state)(request)
    return str(request.finished_reason.to_json()["type"]) if request.finished() else "goes on"


@pytest.mark.parametrize(
    ("tokens", "expected"), [([5, STOP], "stop"), ([5, 6], "abort"), ([STOP, 6], "abort"), ([], "abort")]
)
def test_what_is_aborted_with_its_last_token_has_ended(tokens: list[int], expected: str) -> None:
    assert reason(tokens, aborted=True) == expected


def test_what_fails_has_failed_whatever_its_last_token() -> None:
    assert reason([5, STOP], aborted=True, status=500) == "abort"


@pytest.mark.parametrize(
    ("tokens", "expected"), [([5, STOP], "stop"), ([5, 6], "length"), ([5], "goes on"), ([STOP], "stop")]
)
def test_what_is_cut_with_its_last_token_has_ended(tokens: list[int], expected: str) -> None:
    assert reason(tokens, aborted=False, longest=2) == expected
