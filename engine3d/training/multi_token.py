"""Training of a layer for multi-token prediction, apart from the model whose states it reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine3d.collectives import all_reduce
from engine3d.training.config import TrainConfig
from engine3d.training.optimizer import build_optimizer, wrap_for_training
from engine3d.training.passes.sequences import WEIGHTS, MicroBatch
from engine3d.training.passes.vocab_parallel import logprobs_and_entropy


@dataclass(frozen=True)
class MtpUpdate:
    """Update of a layer for multi-token prediction.

    Args:
        loss: negative log-likelihood of a token, mean over the tokens of all ranks; nan without any.
        grad_norm: global gradient norm before clipping.
    """

    loss: float
    grad_norm: float


class MultiTokenTraining:
    """A layer for multi-token prediction with its gradients, its optimizer and the schedule of its learning rate.

    At each position the layer has the policy's last state and the next token's embedding, and predicts the token after
    that. It learns the tokens with a weight in the policy's loss, all alike. Its forward and backward pass follow each
    forward pass of the policy, whose gradient they have no part in: its states, embedding and output layer are cut off.

    Args:
        layer: this rank's part of the layer.
        model: the rank's part of the policy, without what is wrapped around it.
        config: the settings, with `mtp`.
        vocabulary: tokens without padding.
        tp_group, dp_group: of the rank.
    """

    def __init__(
        self,
        layer: Any,
        model: Any,
        config: TrainConfig,
        *,
        vocabulary: int,
        tp_group: dist.ProcessGroup,
        dp_group: dist.ProcessGroup,
    ) -> None:
        assert config.mtp is not None
        self._model, self._layer, self._config, self._vocabulary = model, layer, config, vocabulary
        self._tp_group, self._dp_group = tp_group, dp_group
        (self.chunk,) = wrap_for_training(layer, config)
        self._inputs: tuple[Tensor, dict[str, Any]] | None = None
        self._tokens, self._temperature = 0.0, 1.0
        self._loss = torch.zeros((), dtype=torch.float64)
        model.decoder.register_forward_hook(self._keep, with_kwargs=True)
        self._learns = False
        self.start_optimizer(config)

    def start_optimizer(self, config: TrainConfig) -> None:
        """Start the optimizer and its schedule afresh."""
        assert config.mtp is not None
        settings = config.mtp.optimizer(config.optimizer)
        self.optimizer, self.scheduler = build_optimizer(
            [self.chunk], config.model_copy(update={"optimizer": settings})
        )

    @contextmanager
    def update(self, batches: Sequence[MicroBatch], temperature: float) -> Iterator[None]:
        """Train the layer on the micro-batches of an update that pass through the model in the block.

        Args:
            batches: of the update.
            temperature: the logits are divided by it, as they were when the tokens were sampled.
        """
        self._temperature = temperature
        self.chunk.restore_grad_buffers(synchronize=False)
        self.reset()
        device = next(self._layer.parameters()).device
        tokens = torch.tensor(float(sum(_predicted(batch).sum() for batch in batches)), device=device)
        all_reduce(tokens, dist.ReduceOp.SUM, self._dp_group)
        self._tokens, self._learns = float(tokens), True
        try:
            yield
        finally:
            self._learns, self._inputs = False, None

    def reset(self) -> None:
        """Set the gradient and the loss to 0."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._loss = torch.zeros((), dtype=torch.float64, device=next(self._layer.parameters()).device)

    def _keep(self, _decoder: Any, _arguments: Any, named: dict[str, Any], states: Tensor) -> None:
        """Keep the states of the policy's last forward pass, and what its layers had next to theirs."""
        if self._learns:
            names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
            self._inputs = states.detach(), {name: named[name] for name in names}

    def learn(self, batch: MicroBatch) -> None:
        """Add the gradient of a micro-batch, on the device, that has just passed through the model."""
        if not (self._learns and torch.is_grad_enabled()):
            return
        assert self._inputs is not None
        (states, named), self._inputs = self._inputs, None
        layer, model = self._layer, self._model
        hidden, *_ = layer(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            hidden_states=states,
            embedding=model.embedding,
            **named,
        )
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        logits, _ = model.output_layer(hidden, weight=weight.detach())
        logits = logits.transpose(0, 1).contiguous()
        targets = batch.targets.view(-1).roll(-1)  # of the last position of a sequence anything: nothing learns it
        logprobs, _ = logprobs_and_entropy(
            logits.view(-1, logits.shape[-1]),
            targets,
            vocabulary=self._vocabulary,
            group=self._tp_group,
            temperature=self._temperature,
            with_entropy=False,
            overwrite=True,
        )
        loss = -logprobs[_predicted(batch)].sum() / max(1.0, self._tokens)
        loss.backward()
        self._loss += loss.detach()

    def finish(self) -> MtpUpdate:
        """Sum the gradient over ranks, and return it with the loss. Follows the passes of an update."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.chunk])
        all_reduce(self._loss, dist.ReduceOp.SUM, self._dp_group)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        update = MtpUpdate(float(self._loss) if self._tokens else math.nan, norm)
        if not math.isfinite(norm):  # a step without a gradient: the optimizers make their steps together
            self.reset()
        return update

    def step(self) -> None:
        """Apply the gradient to the layer's weights."""
        self.optimizer.step()
        self.scheduler.step(1)


def _predicted(batch: MicroBatch) -> Tensor:
    """(B * S,) bool: positions from which a token is predicted that the policy learns, the one after the next.

    The first two tokens of a sequence are predicted from none.
    """
    predicted = torch.zeros(batch.positions, dtype=torch.bool, device=batch.input_ids.device)
    learned = batch.source >= 0
    if (weights := batch.columns.get(WEIGHTS)) is not None:
        learned = learned & (weights != 0)
    source = batch.source[learned]
    source = source[batch.position_ids.view(-1)[source] > 0]
    predicted[source - 1] = True
    return predicted
