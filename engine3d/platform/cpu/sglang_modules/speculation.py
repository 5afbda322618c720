"""SGLang's speculative decoding in plain PyTorch: its own kernels for it are CUDA's, Triton's and AMX's.

Drafts are chains: each drafted token follows the one before it (`speculative_eagle_topk=1`). SGLang's names of tensors
are kept where it gives them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def install() -> None:
    """Give SGLang's modules the functions of this one."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import draft_utils, eagle_utils, eagle_worker_common

    allocation.assign_req_to_token_pool_func = _write_slots
    cache_locs.assign_extend_cache_locs_func = _slots_to_verify
    eagle_worker_common.assign_draft_cache_locs_contiguous = _Launched(_slots_to_draft)
    eagle_worker_common.fill_bonus_tokens_func = _last_drawn
    eagle_worker_common.eagle_sample = _verify
    eagle_utils.sgl_build_tree_kernel_efficient = _link
    Backend.forward_extend = _after_cache(Backend.forward_extend)
    factory = draft_utils.DraftBackendFactory
    factory.create_draft_extend_backend = lambda made: Backend(made.draft_model_runner)
    factory.create_decode_backend = lambda made: _DraftBackends(made.draft_model_runner, made.speculative_num_steps)


class _Launched:
    """A function that is called as a Triton kernel is, with a grid before its arguments."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _slots(table: Tensor, requests: Tensor, starts: Tensor, ends: Tensor) -> Iterator[Tensor]:
    """Views of the slots of some positions of each request: from its start to its end.

    Args:
        table: (requests, positions) slot of each position in the KV cache.
        requests: (batch,) rows of the table.
        starts: (batch,) positions.
        ends: (batch,) positions.
    """
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield table[request, start:end]


def _write_slots(requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, _batch: int) -> None:
    """Write new slots into the table of all requests. `slots`: of all of them, request by request."""
    offset = 0
    for row in _slots(table, requests, starts, ends):
        row.copy_(slots[offset : offset + len(row)])
        offset += len(row)


def _slots_to_verify(
    *, req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, **_: Any
) -> Tensor:
    """Slots of the tokens to verify, request by request."""
    return torch.cat(list(_slots(req_to_token, req_pool_indices, start_offset, end_offset))).to(torch.int64)


def _slots_to_draft(
    requests: Tensor, table: Tensor, lengths: Tensor, slots: Tensor, _width: int, _topk: int, steps: int
) -> None:
    """Fill in the slots of the tokens to draft, request by request."""
    slots.copy_(torch.cat(list(_slots(table, requests, lengths, lengths + steps))))


def _last_drawn(drawn: Tensor, counts: Tensor, last: Tensor, width: int, _batch: int) -> None:
    """Fill in the last drawn token of each request. `drawn`: (requests * width,), of which `counts` (requests,) are."""
    last.copy_(drawn.view(-1, width).gather(1, (counts - 1).long().unsqueeze(1)).squeeze(1))


def _link(
    _parents: Tensor,
    _selected: Tensor,
    lengths: Tensor,
    _mask: Tensor,
    positions: Tensor,
    _index: Tensor,
    _next: Tensor,
    _sibling: Tensor,
    topk: int,
    *_: Any,
) -> None:
    """Fill in the positions of chains of tokens to verify. Attention is causal and reads no mask."""
    assert topk == 1, "drafts are chains"
    steps = torch.arange(len(positions) // len(lengths))
    positions.copy_((lengths.unsqueeze(1) + steps).reshape(-1))


def _verify(verify: Any, batch: Any, output: Any, vocab_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw tokens from the policy: accept a chain's drafts as far as they are drawn, and draw the one after them.

    A draft is accepted with its probability. Where it is not, the token is drawn from the others by theirs: that is the
    policy's distribution (Leviathan et al., https://arxiv.org/abs/2211.17192, for a draft that is certain). Requests of
    the most likely token accept that.

    Args:
        verify: SGLang's `EagleVerifyInput`.
        batch: of the requests.
        output: logits, (requests * tokens, vocabulary): after the last token that was drawn, and after each draft.
        vocab_mask: None.

    Returns:
        (requests * tokens,) drawn tokens, each request's first; (requests,) their number; (requests, tokens) their
        indices, -1 after the last. Each int32.
    """
    chains = verify.draft_token.view(-1, verify.draft_token_num)
    requests, tokens = chains.shape
    sampling = batch.sampling_info
    logits = output.next_token_logits.view(requests, tokens, -1)
    probabilities = (logits / sampling.temperatures.view(-1, 1, 1)).softmax(-1)
    greedy = (sampling.top_ks == 1).view(-1, 1, 1)
    likely = torch.zeros_like(probabilities).scatter_(2, logits.argmax(-1, keepdim=True), 1)
    probabilities = torch.where(greedy, likely, probabilities)
    drafts = chains[:, 1:].long()
    of_drafts = probabilities[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    accepted = (torch.rand_like(of_drafts) < of_drafts).long().cumprod(1).sum(1)
    rows = torch.arange(requests)
    after = probabilities[rows, accepted].clone()
    refused = accepted < tokens - 1
    after[refused, drafts[refused, accepted[refused]]] = 0
    drawn = torch.cat([drafts, drafts.new_zeros(requests, 1)], 1)
    drawn[rows, accepted] = after.multinomial(1).squeeze(1)
    indices = torch.arange(requests * tokens).view(requests, tokens)
    indices = torch.where(torch.arange(tokens) <= accepted.unsqueeze(1), indices, -1)
    results = drawn.view(-1).int(), (accepted + 1).int(), indices.int()
    return _of_first_rank(results)


def _of_first_rank(results: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The first tensor parallel rank's results, on all of them."""
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        for result in results:
            group.broadcast(result, src=0)
    return results


def _after_cache(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention of prompts, for tokens to verify too: they follow those in the cache."""

    def run(self: Any, q: Tensor, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        if not batch.forward_mode.is_target_verify():
            return forward(self, q, k, v, layer, batch, *args, **kwargs)
        lengths = batch.seq_lens
        tokens = torch.full_like(lengths, batch.spec_info.draft_token_num)
        with _set(batch, extend_prefix_lens=lengths, extend_seq_lens=tokens, seq_lens=lengths + tokens):
            return forward(self, q, k, v, layer, batch, *args, **kwargs)

    return run


class _DraftBackends:
    """Attention of drafted tokens, with a backend for each of a chain but the last, which no token follows.

    Args:
        runner: of the draft model.
        steps: tokens of a chain.
    """

    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class DraftBackend(TorchNativeAttnBackend):  # type: ignore[misc]
            """Attention of the drafted token of one index: SGLang's lengths are of what was drawn."""

            def __init__(self, index: int) -> None:
                super().__init__(runner)
                self._index = index

            def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
                with _set(batch, seq_lens=batch.seq_lens + self._index + 1):
                    return super().forward_decode(q, k, v, layer, batch, *args, **kwargs)

        self.attn_backends = [DraftBackend(index) for index in range(steps - 1)]

    def init_forward_metadata(self, batch: Any) -> None:
        """Prepare a forward pass: nothing is to be prepared."""


@contextmanager
def _set(batch: Any, **values: Tensor) -> Iterator[None]:
    """Other attributes of a batch for a while."""
    before = {name: getattr(batch, name) for name in values}
    for name, value in values.items():
        setattr(batch, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)
