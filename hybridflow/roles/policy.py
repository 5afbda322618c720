"""One rank of a policy: the actor, which is trained and sends its weights, or a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engine3d.errors import EngineError
from engine3d.models.experts.routes import RouteFormat, TokenRoutes
from engine3d.reshard.describe.memory import SharedShards
from engine3d.reshard.plan.coordinate import SendOrder
from engine3d.reshard.transport.sender import Sent, Transport
from engine3d.training.passes.sequences import CHOSEN
from hybridflow.algorithms.advantages.whitening import Moments, whiten
from hybridflow.algorithms.config import load
from hybridflow.algorithms.kl_control import KLGuard
from hybridflow.algorithms.losses.policy import CHOSEN_LOGPROBS, policy_gradient_loss
from hybridflow.algorithms.losses.sft import sft_loss
from hybridflow.algorithms.losses.statistics import Statistics
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.sample_fields import OF_LOSSES, ROUTES, WIDE
from hybridflow.batch.worker_output import Columns
from hybridflow.metrics import names as metrics
from hybridflow.roles.model import CheckpointFailure, ModelWorker, Update, of_responses, to_sequences
from hybridflow.workers.protocols import ALL_TO_ALL, ONE_TO_ALL, THREE_D_PROTO, register

if TYPE_CHECKING:
    from engine3d.training.passes.forward import TokenOutputs


class PolicyWorker(ModelWorker):
    """One rank of an actor or a reference policy."""

    @register(ONE_TO_ALL)
    def start(self) -> dict[str, str] | CheckpointFailure:
        """Start as every model; then publish the location of the weights, if engines are to share them."""
        libraries = super().start()
        if self._publish is not None and not isinstance(libraries, CheckpointFailure):
            self._sender = self._engine.weight_sender(self._name, self._rank, self._location, self._engine_precision)
            self._sender.publish(self._publish)
        return libraries

    @register(THREE_D_PROTO, exclusive=True)
    def logprobs(self, batch: SampleBatch, *, temperature: float) -> Columns | None:
        """Compute column `logprobs`, (R,) float32, of the response tokens."""
        outputs = self._engine.logprobs(to_sequences(batch), temperature=temperature)
        if outputs is None or outputs.logprobs is None:
            return None
        return Columns({"logprobs": of_responses(batch, outputs.logprobs, f"{self._name}: the log-prob")})

    @register(THREE_D_PROTO, exclusive=True)
    def base_logprobs(self, batch: SampleBatch, *, temperature: float) -> Columns | None:
        """Compute column `logprobs`, as `logprobs` does, of the model without its adapters."""
        assert self._engine.adapters is not None
        with self._engine.adapters.disabled():
            return self.logprobs(batch, temperature=temperature)

    @register(THREE_D_PROTO, exclusive=True, routes=True)
    def actor_logprobs(
        self, batch: SampleBatch, *, temperature: float, column: str, serving: int, records_routes: bool
    ) -> Columns | None:
        """Compute a column of log-probs, (R,) float32, of the response tokens, routed as an update routes them.

        Args:
            batch: with routes where they are replayed.
            temperature: the logits are divided by it.
            column: name of the column.
            serving: version of the weights before the step.
            records_routes: True to let the routers choose, and add the column `routes`, (T, C), of their choices.
        """
        sequences = to_sequences(batch, routes=None if records_routes else self._replayed(batch, serving))
        outputs = self._engine.logprobs(sequences, temperature=temperature, record_routes=records_routes)
        if outputs is None or outputs.logprobs is None:
            return None
        columns = {column: of_responses(batch, outputs.logprobs, f"{self._name}: the log-prob")}
        return Columns(columns if outputs.routes is None else {**columns, ROUTES: outputs.routes})

    def _replayed(self, batch: SampleBatch, serving: int) -> TokenRoutes | None:
        """Routes by which tokens are routed; None if the routers choose.

        Args:
            batch: with routes.
            serving: version of the weights before the step.

        Raises:
            EngineError: there are none.
        """
        mode = self._config.routing_replay
        if mode == "none":
            return None
        if batch.token_routes is None:
            raise EngineError(f"{self._name}: routing_replay={mode} with samples that have no routes, expected routes")
        if self._config.older_routes == "live":
            return dataclasses.replace(batch.token_routes, ignored=(batch.drawing_versions < serving).numpy())
        return batch.token_routes

    @register(THREE_D_PROTO, exclusive=True)
    def top_tokens(self, batch: SampleBatch, *, count: int) -> Columns | None:
        """Compute column `chosen_tokens`, (R, count) int64: the most likely tokens at each position of the response."""
        outputs = self._engine.logprobs(to_sequences(batch), top=count)
        if outputs is None or outputs.top_tokens is None:
            return None
        return Columns({"chosen_tokens": outputs.top_tokens[batch.is_response]})

    @register(THREE_D_PROTO, exclusive=True, routes=True)
    def update(
        self,
        batch: SampleBatch,
        *,
        algorithm: AlgorithmSettings,
        temperature: float,
        serving: int,
        whitening: Moments | None = None,
        stale: bool = False,
        against_rollout: bool = False,
    ) -> Update:
        """Take one optimizer step of policy optimization; none where `algorithm.kl_guard` refuses it.

        Args:
            batch: a mini-batch with weights and advantages, and old and reference log-probs where the algorithm needs
                them.
            algorithm: the settings.
            temperature: the logits are divided by it, as they were when the tokens were sampled.
            serving: version of the weights before the step.
            whitening: moments of the advantages of the whole batch, by which they are whitened; None leaves them.
            stale: True if an older policy made the batch, so that the engines' log-probs are of other weights.
            against_rollout: True if the ratio is to the policy that made the batch, with the engines' log-probs.
        """
        from engine3d.training.update import UpdateGuard

        advantages = batch.advantages
        if whitening is not None:
            assert advantages is not None
            advantages = whiten(advantages, batch.response_mask, whitening)
        columns = {"advantages": advantages, "weights": batch.weights, "ref_logprobs": batch.ref_logprobs}
        columns |= {name: getattr(batch, name) for name in (*OF_LOSSES, *WIDE)}
        columns["old_logprobs"] = batch.logprobs if against_rollout else batch.old_logprobs
        if not stale and not against_rollout and algorithm.needs_engines:
            columns["rollout_logprobs"] = batch.logprobs
        present = {name: value for name, value in columns.items() if value is not None}
        # Without replay they are compared with what the routers choose.
        routes = batch.token_routes if self._config.routing_replay == "none" else self._replayed(batch, serving)
        sequences = to_sequences(batch, routes=routes, **present)

        policy_loss = load(algorithm.name).policy_loss

        def loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, Statistics]:
            assert outputs.logprobs is not None
            if outputs.chosen_logprobs is not None:  # of the tokens in this column, which the model has read
                columns = {name: column for name, column in columns.items() if name != CHOSEN}
                columns[CHOSEN_LOGPROBS] = outputs.chosen_logprobs
            return policy_gradient_loss(
                outputs.logprobs,
                entropy=outputs.entropy,
                sequences=outputs.sequences,
                config=algorithm,
                policy_loss=policy_loss,
                **columns,
            )

        guard = None
        if algorithm.kl_guard is not None:
            guard = UpdateGuard(_policy_kl, KLGuard(algorithm.kl_guard).trips)
        return self._update(sequences, loss, temperature=temperature, with_entropy=True, guard=guard)

    @register(THREE_D_PROTO, exclusive=True)
    def supervise(self, batch: SampleBatch) -> Update:
        """Take one optimizer step towards the responses of a mini-batch with weights."""
        assert batch.weights is not None

        def loss(outputs: TokenOutputs, columns: dict[str, Tensor]) -> tuple[Tensor, Statistics]:
            assert outputs.logprobs is not None
            return sft_loss(outputs.logprobs, **columns)

        routes = None
        if self._config.routing_replay != "none":  # nobody drew these responses: the routers choose
            routes = RouteFormat.of(self._engine.spec.sizes).no_routes(batch.sequence_lengths)
        return self._update(to_sequences(batch, routes=routes, weights=batch.weights), loss)

    @register(ONE_TO_ALL)
    def share_weights(self) -> SharedShards:
        """Describe the elements of the model in this rank's memory, and how to reach them."""
        return self._sender.share()

    @register(ALL_TO_ALL)
    def connect_weights(self, orders: Sequence[SendOrder]) -> None:
        """Prepare to send. `orders`: one for each separate transfer."""
        self._sender.connect(*orders)

    @register(ONE_TO_ALL)
    def send_weights(self, version: int, *, transfer: int = 0) -> dict[Transport, Sent]:
        """Send this rank's shard of one connected transfer. Return what went over each transport."""
        return self._sender.send(version, transfer)


def _policy_kl(statistics: list[Statistics]) -> tuple[Tensor, Tensor]:
    """Return the KL divergence from the policy that the step began with: its sum over tokens (k3), and their number."""
    return Statistics.merge(statistics).means[metrics.TRAIN_KL_K3]
