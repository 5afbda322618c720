"""A run step by step: the caller has the loop, and sees the rollouts before they are learned from."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from engine3d.errors import DamagedCheckpointError, UserError
from hybridflow.algorithms.advantages.whitening import moments
from hybridflow.algorithms.base import Experience
from hybridflow.algorithms.checks import check_finite
from hybridflow.api.config import PPOConfig
from hybridflow.api.input_files import InputFiles, Prompt, RewardFunction, Sources
from hybridflow.api.recipe_builder import free_directory
from hybridflow.api.rl_trainer import changed, check_same_config, checked_config, checked_recipe, refuse_unknown
from hybridflow.api.rollout_batch import RolloutBatch
from hybridflow.batch.remote_batch import RemoteBatch
from hybridflow.config.reading.known_names import no_attribute
from hybridflow.metrics import names as metrics
from hybridflow.metrics.logger import Timer
from hybridflow.trainer.run import fall_back, start_trainer
from hybridflow.trainer.startup.run_setup import open_run
from hybridflow.trainer.step import TrainerStep
from hybridflow.trainer.trainer import Trainer


@dataclass(frozen=True, eq=False)
class _Made:
    """A rollout: as the caller has it, and where it was made."""

    batch: RolloutBatch
    experience: Experience
    step: TrainerStep


class PPOTrainer:
    """The roles of a run, and its two calls.

        with PPOTrainer(config, model=directory, reward_fn=reward, prompts=prompts) as trainer:
            for _ in range(config.max_steps):
                rollouts = trainer.rollout()
                statistics = trainer.update(rollouts)

    All that it starts ends with `close`, when the `with` block is left, or with the program.

    Args:
        config: the settings; its algorithm may be any other too.
        model, tokenizer, reward_fn, reward_model: as of `RLTrainer`.
        prompts: to learn from, texts or {"prompt": ..., "answer": ...}; those of the recipe if not given.
        checkpoint_config: that of the settings.

    Raises:
        UserError: an argument that makes no sense, in one line.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        *unnamed: Any,
        model: Any = None,
        tokenizer: Any = None,
        reward_fn: RewardFunction | str | None = None,
        reward_model: Any = None,
        prompts: Sequence[Prompt] | None = None,
        checkpoint_config: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if unnamed:
            raise UserError(
                f"PPOTrainer: {len(unnamed)} arguments without a name after the config, expected names: "
                "PPOTrainer(config, model=..., reward_fn=..., prompts=...)"
            )
        refuse_unknown(type(self), others)
        self.config = self._given = checked_config(config)
        if checkpoint_config is not None:
            self.config = changed(self.config, checkpoint_config=checkpoint_config)
        self._sources, self._prompts = Sources(model, tokenizer, reward_fn, reward_model), prompts
        self._stack = ExitStack()
        self._trainer: Trainer | None = None
        self._closed = False
        self._made: list[_Made] = []

    if not TYPE_CHECKING:  # a type checker is to find a method that is not there

        def __getattr__(self, name: str) -> NoReturn:
            raise no_attribute(PPOTrainer, name)

    def init_distributed(self, config: PPOConfig | None = None) -> None:
        """Start the roles, if they are not there: what the first `rollout` does otherwise.

        Args:
            config: the trainer's own, or None.

        Raises:
            SettingsError: one line for everything that is wrong, before anything is started.
            UserError: another config, or the trainer is closed.
            EngineError: a role failed.
        """
        check_same_config(config, self._given, self.config)
        if self._closed:
            raise UserError("the trainer is closed, expected a new one")
        if self._trainer is not None:
            return
        try:
            self._trainer = self._start()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def rollout(self) -> RolloutBatch:
        """Responses to the next prompts, with all that the algorithm learns from.

        Returns:
            The samples: `input_ids` (B, S), `attention_mask` (B, S), `generated_ids` (B, S'), `logprobs` (B, S'),
            `rewards` (B,), `advantages` (B, S') and more, on the CPU.

        Raises:
            UserError: a reward function failed.
            EngineError: a role failed.
        """
        trainer = self._started()
        step = trainer.next_step(trainer.steps_done + 1, begun=bool(self._made))
        with Timer(step.values, metrics.TRAIN_STEP_TIME):
            experience = trainer.algorithm.make_experience(step)
            step.wait_for_columns()
        batch = RolloutBatch.of(experience.batch.fetch(), trainer.setup.tokenizer.pad_token_id)
        self._made.append(_Made(batch, experience, step))
        return batch

    def update(self, rollouts: RolloutBatch) -> dict[str, float]:
        """Learn from rollouts, and bring the new weights to the engines.

        Args:
            rollouts: what `rollout` returned since the last update: as it is, some samples of it (`select`), several
                joined (`concatenate`), or with other `rewards`, `costs` or `advantages` (`replace`). Where rewards or
                costs are others and advantages are not, the advantages are estimated again. With `rollout.stream` or
                `trainer.max_staleness` above 0 an update has one rollout.

        Returns:
            The metrics of the step by name, and `reward`, the mean of `rollouts.rewards`.

        Raises:
            UserError: samples that were not rolled out since the last update, too few of them, or without rewards.
            EngineError: a role failed.
        """
        if not self._made:
            shown = "rollouts" if isinstance(rollouts, RolloutBatch) else f"a {type(rollouts).__name__}"
            raise UserError(f"update: {shown} before any rollout(), expected what rollout() returned")
        trainer = self._started()
        step = trainer.next_step(trainer.steps_done + 1, begun=bool(self._made))
        for made in self._made:
            step.record.add_all(made.step.record, step.version - 1, trainer.setup.train)
        rollout = next((made for made in self._made if made.batch is rollouts), None)
        if rollout is not None:
            trainer.learn(step, lambda: rollout.experience)
        else:
            if trainer.algorithm.together > 1:
                raise UserError(
                    f"update: not as rollout() returned it, with algorithm {trainer.recipe.algorithm.name}, which "
                    "learns from pairs of samples; expected one rollout as it is"
                )
            given = to_learn(rollouts, [made.batch for made in self._made], least=step.least_samples)
            experience = self._experience(given)
            estimate = trainer.algorithm.with_advantages
            trainer.learn(step, lambda: experience if given.advantages is not None else estimate(step, experience))
        trainer.save(step.number)
        self._made.clear()
        assert rollouts.rewards is not None
        return step.values | {"reward": float(rollouts.rewards.mean())}

    def export(self, directory: str | Path) -> Path:
        """Write the current model as a HuggingFace directory; return its path.

        Raises:
            EngineError: the actor failed.
        """
        path = Path(directory).absolute()
        self._started().roles.actor.export(path).result()
        return path

    def close(self) -> None:
        """End all that was started. May be called twice."""
        self.__exit__(None, None, None)

    def __enter__(self) -> PPOTrainer:
        self.init_distributed()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        trainer, self._trainer, self._closed = self._trainer, None, True
        self._made.clear()
        atexit.unregister(self.close)
        if kind is not None or trainer is None:
            self._stack.__exit__(kind, error, traceback)
            return
        with self._stack:  # the save of the last update may still be written
            trainer.phases.enter("save")
            trainer.checkpoints.wait()

    def _start(self) -> Trainer:
        stack = self._stack
        files = InputFiles(free_directory(self.config))
        stack.callback(files.close)
        recipe = checked_recipe(self.config, self._sources.write(files, self._prompts))
        atexit.register(self.close)  # after Ray's own, which was registered when it was imported, and so before it
        while True:
            with ExitStack() as run_stack:
                opened = run_stack.enter_context(open_run(recipe))
                phases = opened.phases
                run_stack.push(lambda kind, *_, phases=phases: phases.enter("end") if kind is None else None)
                try:
                    with ExitStack() as started:
                        trainer = started.enter_context(start_trainer(opened))
                        trainer.start()
                        run_stack.push(started.pop_all())
                except DamagedCheckpointError as error:
                    fall_back(opened, error)
                    continue
                stack.push(run_stack.pop_all())
                return trainer

    def _started(self) -> Trainer:
        self.init_distributed()
        assert self._trainer is not None
        return self._trainer

    def _experience(self, given: RolloutBatch) -> Experience:
        """Build the experience of rollouts that the caller has changed."""
        experiences = [made.experience for made in self._made]
        whiten = None  # where advantages are estimated again, so are their moments
        if given.advantages is not None and any(experience.whiten is not None for experience in experiences):
            whiten = moments(given.advantages, given.response_mask)
        baselines = {group: reward for experience in experiences for group, reward in experience.baselines.items()}
        return Experience(RemoteBatch.of(given.samples()), whiten, baselines)


def to_learn(rollouts: RolloutBatch, batches: Sequence[RolloutBatch], *, least: int) -> RolloutBatch:
    """Return the changed experience to train on.

    Args:
        rollouts: some samples of `batches`, perhaps with other rewards, costs or advantages.
        batches: the rollouts since the last update.
        least: samples that an update needs.

    Returns:
        The same samples; without advantages and returns where these are to be estimated again, from rewards or costs
        that are others than those of the advantages.

    Raises:
        UserError: no rollouts, samples without rewards or costs or of no rollout, too few, or rewards, costs or
            advantages that are not finite.
    """
    if not isinstance(rollouts, RolloutBatch):
        raise UserError(f"update: a {type(rollouts).__name__}, expected the rollouts that rollout() returned")
    if rollouts.rewards is None:
        raise UserError("update: rollouts without rewards, expected replace(rewards=...) on them first")
    if len(rollouts) < least:
        raise UserError(
            f"update: {len(rollouts)} samples, expected at least {least}, one for each data-parallel rank of each "
            "mini-batch"
        )
    before = _as_rolled_out(rollouts, batches)
    if rollouts.costs is None and before.costs is not None:
        raise UserError("update: rollouts without costs, expected those of rollout() or others")
    try:
        check_finite("update", "reward", rollouts.rewards)
        if rollouts.costs is not None:
            check_finite("update", "cost", rollouts.costs)
        if rollouts.advantages is not None:
            check_finite("update", "advantage", rollouts.advantages, rollouts.response_mask)
    except ValueError as error:
        raise UserError(str(error)) from None
    if rollouts.advantages is not None:
        scores = [(rollouts.rewards, before.rewards), (rollouts.costs, before.costs)]
        scored_again = any(now is not None and not torch.equal(now, then) for now, then in scores)  # type: ignore[arg-type]
        if not scored_again or not _same(rollouts.advantages, before.advantages):
            return rollouts
    return rollouts.replace(advantages=None, returns=None, cost_returns=None)


def _as_rolled_out(rollouts: RolloutBatch, batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """The samples of `rollouts` as they were at first."""
    ids = [sample for batch in batches for sample in batch.sample_ids.tolist()]
    row_of = {sample: row for row, sample in enumerate(ids)}
    unknown = [sample for sample in rollouts.sample_ids.tolist() if sample not in row_of]
    if unknown:
        raise UserError(f"update: sample {unknown[0]} is of no rollout() since the last update, expected only such")
    return RolloutBatch.concatenate(batches).select([row_of[sample] for sample in rollouts.sample_ids.tolist()])


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """True if two columns of responses have the same values, whatever their padding."""
    assert other is not None
    width = min(one.shape[1], other.shape[1])
    return torch.equal(one[:, :width], other[:, :width])
