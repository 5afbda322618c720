"""Speculative decoding: a forward pass draws several tokens of a request.

SGLang notes what `customized_info` has of a request once for each pass, and sends it on token by token. Here each token
of a pass has it.
"""

from __future__ import annotations

from typing import Any

DRAFT_VARIABLE = "ENGINE3D_DRAFT_TOKENS"
"""Environment variable of an engine that drafts tokens, with their number."""


def register() -> None:
    """Register with SGLang, in a scheduler's process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register(f"{processor}._maybe_collect_customized_info", repeat_for_tokens, HookType.AFTER)


def repeat_for_tokens(result: None, processor: Any, index: int, request: Any, output: Any) -> None:
    """After SGLang's method of that name: the pass's entry is that of all tokens that it has drawn."""
    for values in (request.customized_info or {}).values():
        values.extend(values[-1:] * (len(request.output_ids) - len(values)))
