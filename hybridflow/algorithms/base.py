"""What an algorithm is, and the operations that it composes."""

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
"""What values foretell: rewards (columns `values` and `returns`) or costs (`cost_values` and `cost_returns`)."""


@dataclass(frozen=True)
class Estimated:
    """What is told of the advantages and returns of some samples.

    Args:
        advantages: their moments.
        critics: moments of the returns, by the kind of the critic that is to learn them.
    """

    advantages: Moments
    critics: Mapping[ValueKind, ValueMoments]


class Applied(PendingColumns, Protocol):
    """What a function finds of samples, there or not yet; the columns go to a batch by `RemoteBatch.with_columns`."""

    def facts(self) -> dict[str, Tensor]:
        """Wait for it; one figure for each sample, by name."""

    def notes(self) -> list[Any]:
        """Wait for it; the note of each part of the batch."""


@dataclass(frozen=True, eq=False)
class Experience:
    """Samples to learn from.

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
    """From 1."""
    values: dict[str, float]
    """The figures of the step, by metric name."""

    @property
    @abstractmethod
    def config(self) -> C:
        """The algorithm's settings, with the KL coefficient of now."""

    @property
    @abstractmethod
    def multiplier(self) -> LagrangeMultiplier:
        """The weight of costs against rewards, of an algorithm that learns from costs."""

    @property
    @abstractmethod
    def replay(self) -> ReplayBuffer:
        """The samples of former steps, of an algorithm that keeps some."""

    @property
    @abstractmethod
    def prompts_per_step(self) -> int:
        """How many prompts a step is to learn from."""

    @property
    @abstractmethod
    def least_prompts(self) -> int:
        """The fewest that can be drawn at once: one for each engine, and a response for each rank that rewards them."""

    @abstractmethod
    def response_limits(self, batch: RemoteBatch) -> Tensor:
        """(B,) int64: the most tokens that each response could have, by its prompt."""

    @property
    @abstractmethod
    def least_samples(self) -> int:
        """The fewest that `update` takes."""

    @abstractmethod
    def generator(self, name: str) -> Generator:
        """For choices at random: the same ones for the same seed of the run, step and name."""

    @abstractmethod
    def draw(self, count: int | None = None) -> Draw:
        """The next prompts: so many, `prompts_per_step` if None."""

    @abstractmethod
    def tell(self, figures: Mapping[str, Tensor]) -> None:
        """Figures of the step, by metric name: (k,) each, of which the mean over all that are told is logged."""

    @abstractmethod
    def given(self, draw: Draw) -> RemoteBatch:
        """The two responses that the data have to each prompt, side by side, where no engines run.

        With the facts `rewards`, 1 where a response is good and 0 where it is bad, and `reference_logprobs`.
        """

    @abstractmethod
    def generate(self, draw: Draw) -> RemoteBatch:
        """Responses of the current policy, `rollout.samples_per_prompt` to each prompt."""

    @abstractmethod
    def recall(self, samples: SampleBatch) -> RemoteBatch:
        """Samples of older policies, to learn from in this step too; to be called before `logprobs`.

        The ratio of every sample of the step is then to the log-probs of the engines, as those of older policies are
        not to be had otherwise.
        """

    @abstractmethod
    def generate_greedy(self, draw: Draw) -> RemoteBatch:
        """The most likely response to each prompt, under the group of its draw."""

    @abstractmethod
    def logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """The batch with the log-probs that are needed: of the reference, and of the policy before the first update."""

    @abstractmethod
    def teacher_logprobs(self, batch: RemoteBatch, *, top_k: int = 0, of_student: bool = False) -> RemoteBatch:
        """The batch with `teacher_logprobs` and `teacher_agrees`, of the tokens that the policy wrote.

        Args:
            batch: the responses.
            top_k: above 0, with `chosen_tokens` too, so many in the place of each token, and the teacher's
                `teacher_chosen_logprobs` of them.
            of_student: these are the most likely tokens of the policy; otherwise those of the teacher.
        """

    @abstractmethod
    def critic_values(self, batch: RemoteBatch) -> RemoteBatch:
        """The batch with the values of every critic."""

    @abstractmethod
    def rewards(self, batch: RemoteBatch, *, baseline: bool = False, part: bool = False) -> RemoteBatch:
        """The samples that have a reward, with the fact `rewards`: the sum over all functions and the reward model.

        Args:
            baseline: these are not the samples to learn from, and stay out of the step's figures.
            part: they are some of the step's samples, which may be too few to learn from alone.
        """

    @abstractmethod
    def costs(self, batch: RemoteBatch) -> RemoteBatch:
        """The samples that have a cost, with the fact `costs`: the sum over all functions and the cost model."""

    @abstractmethod
    def estimate(
        self, batch: RemoteBatch, function: Callable[..., Columns], role: str, **arguments: float
    ) -> tuple[RemoteBatch, Moments]:
        """The batch with the columns that a function of it finds where the tokens are: advantages and returns.

        Args:
            function: (batch, config=..., **arguments) -> columns, with an `Estimated` as their note.
            role: on whose ranks it is called.
            arguments: what it needs beside the settings.

        Returns:
            The batch, and the moments of its advantages.
        """

    @abstractmethod
    def apply(self, batch: RemoteBatch, function: Callable[..., Columns], **arguments: Any) -> Applied:
        """Columns, facts and a note that a function finds of samples where their tokens are: on the actor's ranks.

        Args:
            batch: the samples.
            function: (batch, config=..., **arguments) -> columns.
            arguments: what it needs beside the settings.
        """

    @abstractmethod
    def current_logprobs(self, batch: RemoteBatch) -> RemoteBatch:
        """The batch with the column `current_logprobs`: those of the policy as it is now, between two updates."""

    @abstractmethod
    def sequence_kl(self, batch: RemoteBatch) -> Tensor | float:
        """(B,) float32: the KL penalty of each response, the sum over its tokens; 0 if rewards have none."""

    @abstractmethod
    def update(self, experience: Experience, *, value_clip: float | None = None, critics_only: bool = False) -> None:
        """The optimizer steps of one experience, of the actor and of every critic.

        Args:
            experience: whose samples have `advantages`, and the returns of every critic.
            value_clip: how far a value moves before a critic's loss is clipped; None does not clip.
            critics_only: the actor stays as it is.
        """


def read_by_models(step: Step[Any], batch: RemoteBatch) -> RemoteBatch:
    """The batch with the log-probs that are needed, and the values of every critic."""
    return step.critic_values(step.logprobs(batch))


@dataclass(frozen=True)
class Algorithm[C: AlgorithmSettings]:
    """An algorithm.

    Args:
        settings: its settings.
        make_experience: generates samples and finds all that is learned from, advantages included.
        with_advantages: an experience with the advantages that follow from its rewards: the last part of
            `make_experience`, and what is done again where rewards were replaced.
        learn: updates the trained roles, and what else the algorithm learns.
        policy_loss: the loss of each token of the actor.
        prepare: what a mini-batch needs beyond its columns, of the policy as it is just before the update from it;
            called for each update of the actor. None where nothing is needed.
        together: so many samples, side by side, stay in one mini-batch.
        preference_loss: of two responses to each prompt, in an algorithm that learns from such alone: what an
            evaluation without engines measures.
        read: what the models say of rewarded samples that are all learned from: the part of `make_experience` that is
            done again, before `with_advantages`, where a step is made again from stored samples.
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
