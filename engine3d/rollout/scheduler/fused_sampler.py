"""SGLang's sampler, with tokens and their log-probs in one pass over the logits where a batch asks for no more.

SGLang divides the logits, makes probabilities of them, draws, takes logarithms and clamps them, each as large as the
logits: of many requests and a large vocabulary a tenth of a decoding step, on every tensor-parallel rank alike. What
asks for more (the most likely token, top_k, top_p, min_p, a seed, log-probs of other tokens) is SGLang's as ever.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler, register_sampler_backend

from engine3d.platform import platform

_BACKENDS = ("flashinfer", "pytorch")
"""SGLang's names of what draws where this does not."""


def register() -> None:
    """Register this sampler with SGLang's model runners of this process."""
    for backend in _BACKENDS:
        register_sampler_backend(backend, FusedSampler)


class FusedSampler(Sampler):  # type: ignore[misc]
    """Draws the same distribution with other random numbers: by inversion, from one for each token."""

    def __init__(self) -> None:
        super().__init__()
        logging.getLogger(__name__).info("Tokens and their log-probs are drawn in one pass over the logits.")

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """See SGLang's."""
        asks_for_more = (
            sampling_info.is_all_greedy
            or sampling_info.need_top_p_sampling
            or sampling_info.need_top_k_sampling
            or sampling_info.need_min_p_sampling
            or sampling_info.sampling_seed is not None
            or any(sampling_info.return_sampling_masks or ())
            or self.rl_on_policy_target is not None
            or (return_logprob and (any(top_logprobs_nums) or any(tokens is not None for tokens in token_ids_logprobs)))
        )
        if asks_for_more:
            tokens: torch.Tensor = super().forward(
                logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
            )
            return tokens
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        # Tensor-parallel ranks have the same logits and the same random state, and so draw the same.
        uniforms = torch.rand(len(logits), dtype=torch.float64, device=logits.device)
        tokens, logprobs = platform.draw_tokens(logits, sampling_info.temperatures.view(-1), uniforms)
        if return_logprob:
            LogprobResult(token_logprobs=logprobs).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens
