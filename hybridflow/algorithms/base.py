"""The interface of an algorithm, and the operations of a step that it composes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hybridflow.algorithms.advantages.whitening import Moments
from hybridflow.algorithms.lagrange_multiplier import LagrangeMultiplier
from hybridflow.algorithms.losses.clipped import clipped_loss
from hybridflow.algorithms.losses.policy import PolicyLossFunction
from hybridflow.algorithms.losses.preference import PreferenceLoss
from hybridflow.algorithms.losses.value import ValueMoments
from hybridflow.algorithms.replay import ReplayBuffer
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.batch.remote_batch import PendingColumns, RemoteBatch
from hybridflow.batch.sample_batch import SampleBatch
from hybridflow.batch.worker_output import Columns
from hybridflow.data.prompts import Draw

if TYPE_CHECKING:
    from torch import Generator, Tensor

ValueKind = Literal["reward", "cost"]
"""Target of a critic: rewards (columns `values` and `returns`) or costs (`cost_values` and `cost_returns`)."""


@dataclass(frozen=True)
class Estimated:
    """Moments of the advantages and returns of some samples, reported to the driver.

    Args:
        advantages: their moments.
        critics: moments of the returns, by the kind of the critic that is trained on them.
    """

    advantages: Moments
    critics: Mapping[ValueKind, ValueMoments]


class Applied(PendingColumns, Protocol):
    """Pending result of a function of samples. `RemoteBatch.with_columns` adds its columns to a batch."""

    def per_sample(self) -> dict[str, Tensor]:
        """Wait for the result. Return one value for each sample, by name."""

    def notes(self) -> list[Any]:
        """Wait for the result. Return the note of each shard of the batch."""


@dataclass(frozen=True, eq=False)
class Experience:
    """Samples to train on.

    Args:
        batch: the samples, with log-probs, values, rewards and costs as the algorithm has them, and with advantages.
        whiten: moments of the advantages, which an update brings to mean 0 and standard deviation 1; None leaves them.
        baselines: reward of the most likely response to each prompt, by group; none where that is no baseline.
    """

    batch: RemoteBatch
    whiten: Moments | None = None
    baselines: Mapping[int, float] = field(default_factory=dict)


class Step[C: AlgorithmSettings](ABC):
    """One step: what an algorithm with settings C is written against.

    Calls of models return at once; what they make is waited for where it is needed first.
    """

    number: int
    """Number of the step, from 1."""
    values: dict[str, float]
    """Metrics of the step, by name."""

    @property
    @abstractmethod
    def config(self) -> C:
        """The algorithm's settings, with the current KL coefficient."""

    @property
    @abstractmethod
    def multiplier(self) -> LagrangeMultiplier:
        """The weight of costs against rewards, of an algorithm that trains on costs."""

    @property
    @abstractmethod
    def replay(self) -> ReplayBuffer:
        """The replay buffer: samples of earlier steps, of an algorithm that keeps some."""

    @property
    @abstractmethod
    def prompts_per_step(self) -> int:
        """Prompts that a step trains on."""

    @property
    @abstractmethod
    def least_prompts(self) -> int:
        """Least prompts of one draw: one for each engine, and a response for each rank that computes rewards."""

    @abstractmethod
    def response_limits(self, batch: RemoteBatch) -> Tensor:
        """Return (B,) int64: the most tokens that each response could have, by its prompt."""

    @property
    @abstractmethod
    def least_samples(self) -> int:
        """Least samples that `update` accepts."""

    @abstractmethod
    def generator(self, name: str) -> Generator:
        """Return a random generator that depends on the seed of the run, the step and the name alone."""

    @abstractmethod
    def draw(self, count: int | None = None) -> Draw:
        """Draw the next `count` prompts, `prompts_per_step` if None."""

    @abstractmethod
    def log(self, stats: Mapping[str, Tensor]) -> None:
        """Log the mean of (k,) values for each metric name, over all values that the step logs for it."""

    @abstractmethod
    def given(self, draw: Draw) -> RemoteBatch:
        """Read the two responses of the data to each prompt, adjacent, where no engines run.

        Its per-sample columns: `rewards`, 1 where a response is good and 0 where it is bad, and `reference_logprobs`.
        """

    @abstractmethod
    def generate(self, draw: Draw) -> RemoteBatch:
        """Generate `rollout.samples_per_prompt` responses of the current policy to each prompt."""

    @abstractmethod
    def recall(self, samples: SampleBatch) -> RemoteBatch:
        """Add samples of older policies to those that this step trains on. Call it before `logprobs`.

        The ratio of every sample of the step then uses the log-probs of the engines: the trainer cannot compute those
        of older policies.
        """

    @abstractmethod
    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        """Generate the most likely response to each prompt, under the group of its draw."""

    @abstractmethod
    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """Add the log-probs that are needed: of the reference, and of the policy before the first update."""

    @abstractmethod
    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        """Add `teacher_logprobs` and `teacher_agrees` of the tokens that the policy wrote.

        Args:
            batch: the responses.
            top_k: above 0, also add `chosen_tokens`, top_k at the position of each token, and their log-probs from the
                teacher, `teacher_chosen_logprobs`.
            of_student: the chosen tokens are the most likely ones of the policy, otherwise those of the teacher.
        """

    @abstractmethod
    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        """Add the values of every critic."""

    @abstractmethod
    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, partial: bool = False) -> RemoteBatch:
        """Keep the samples that have a reward, and add the per-sample column `rewards`.

        The sum over all functions and the reward model.

        Args:
            baseline: the step does not train on these samples, and its metrics leave them out.
            partial: these are some of the step's samples, and may be too few for an update.
        """

    @abstractmethod
    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        """Keep the samples that have a cost, and add the per-sample column `costs`.

        The sum over all functions and the cost model.
        """

    @abstractmethod
    def estimate(
        self, batch: RemoteBatch, function: Callable[..., Columns], role: str, **arguments: float
    ) -> tuple[RemoteBatch, Moments]:
        """Add the columns that a function computes where the tokens are: advantages and returns.

        Args:
            function: (batch, config=..., **arguments) -> columns, with an `Estimated` as their note.
            role: the role whose ranks call it.
            arguments: further arguments of the function.

        Returns:
            The batch, and the moments of its advantages.
        """

    @abstractmethod
    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Applied:
        """Call a function where the tokens are, on the actor's ranks, for columns, per-sample columns and a note.

        Args:
            batch: the samples.
            function: (batch, config=..., **arguments) -> columns.
            arguments: further arguments of the function.
        """

    @abstractmethod
    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """Add the column `current_logprobs`: log-probs of the current policy, between two updates."""

    @abstractmethod
    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        """Return the (B,) float32 KL penalty of each response, the sum over its tokens, or 0 if rewards have none."""

    @abstractmethod
    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        """Take the optimizer steps of one experience, of the actor and of every critic.

        Args:
            experience: whose samples have `advantages`, and the returns of every critic.
            value_clip: how far a value moves before a critic's loss is clipped; None does not clip.
            critics_only: the actor stays as it is.
        """


def read_by_models(step: Step[Any], batch: RemoteBatch) -> RemoteBatch:
    """Add the log-probs that are needed, and the values of every critic."""
    return step.critic_values(step.logprobs(batch))


@dataclass(frozen=True)
class Algorithm[C: AlgorithmSettings]:
    """An algorithm.

    Args:
        settings: its settings.
        make_experience: generates samples and computes all that the update needs, advantages included.
        with_advantages: adds the advantages that follow from the rewards: the last part of `make_experience`, repeated
            where rewards were replaced.
        learn: updates the trained roles and the algorithm's own state.
        policy_loss: the loss of each token of the actor.
        prepare: adds the columns of a mini-batch that depend on the policy just before its update. Called for each
            update of the actor. None where nothing is needed.
        together: number of adjacent samples that stay in one mini-batch.
        preference_loss: loss of two responses to each prompt, in an algorithm that trains on pairs alone. An
            evaluation without engines measures it.
        read: adds the models' columns to rewarded samples that are all trained on: the part of `make_experience` that
            a replay of stored samples repeats, before `with_advantages`.
    """

    settings: type[C]
    make_experience: Callable[[Step[C]], Experience]
    with_advantages: Callable[[Step[C], Experience], Experience]
    learn: Callable[[Step[C], Experience], None]
    policy_loss: PolicyLossFunction = clipped_loss
    prepare: Callable[[Step[C], RemoteBatch], RemoteBatch] | None = None
    together: int = 1
    preference_loss: PreferenceLoss | None = None
    read: Callable[[Step[C], RemoteBatch], RemoteBatch] = read_by_models
