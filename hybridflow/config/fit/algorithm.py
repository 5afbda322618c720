"""Combinations of an algorithm's settings with those of the run that are refused."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.algorithms.corrections.settings import CorrectionSettings
from hybridflow.algorithms.dapo import DAPOSettings
from hybridflow.algorithms.distillation import DistillationSettings
from hybridflow.algorithms.dynamic_sampling import DynamicSamplingSettings
from hybridflow.algorithms.pf_ppo import PFPPOSettings
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.algorithms.preferences import PreferenceSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.run import TrainerConfig
from hybridflow.data.config import DataConfig
from hybridflow.rollout.config import RolloutRole


def misfits(
    algorithm: AlgorithmSettings, trainer: TrainerConfig, rollout: RolloutRole, data: DataConfig
) -> Iterator[str]:
    """Yield a line for each combination of settings that is refused."""
    if rollout.stream is not None or trainer.max_staleness > 1:
        yield from _of_stream(trainer, rollout)
    if trainer.async_evaluation and rollout.stream is not None:
        yield (
            "trainer.async_evaluation=true with rollout.stream, whose engines respond to prompts of further steps "
            "while models learn; expected false, or no stream"
        )
    if traced := trainer.traced_rollout_steps:
        setting = f"trainer.profile.rollout_steps={traced}"
        if rollout.stream is not None:
            yield f"{setting} with rollout.stream, where a rollout is of no step alone; expected 0"
        elif trainer.max_staleness:
            yield (
                f"{setting} with trainer.max_staleness={trainer.max_staleness}, where the engines are in the next "
                "step's rollout already; expected 0"
            )
    yield from _of_staleness(algorithm, trainer)
    if algorithm.correction is not None:
        yield from _of_correction(algorithm, algorithm.correction, trainer)
    if isinstance(algorithm, DynamicSamplingSettings) and algorithm.dynamic_sampling:
        yield from _of_dynamic_sampling(trainer, data)
    if algorithm.on_policy:
        yield from _of_one_update(algorithm.name, trainer)
    if isinstance(algorithm, DAPOSettings):
        yield from _of_length_penalty(algorithm, rollout)
    if isinstance(algorithm, PFPPOSettings):
        yield from _of_filtration(algorithm, trainer, rollout)
    if trainer.epochs_of_data is None:
        yield from pretraining_misfits(algorithm, trainer.steps)


def replay_misfits(
    mode: str, algorithm: AlgorithmSettings, trainer: TrainerConfig, rollout: RolloutRole
) -> Iterator[str]:
    """Yield a line for each setting that `train.routing_replay` does not go with. `mode`: its value, not "none"."""
    setting, name = f"train.routing_replay={mode}", f"algorithm.name={algorithm.name}"
    if not algorithm.needs_engines:
        yield f"{setting} with {name}, whose responses the data have, without routes; expected none"
        return
    if isinstance(algorithm, DistillationSettings | PreferenceSettings) or algorithm.kept_samples:
        yield f"{setting} with {name}, which was not tried; expected none"
    if mode != "update":
        return
    if rollout.engine.routes:
        yield f"{setting} with rollout.engine.routes=true, whose routes nobody would read; expected rollout, or false"
    correction = algorithm.correction
    if correction is not None and not correction.needs_proximal:
        yield (
            f"{setting} with algorithm.correction, which needs no log-probs of the policy before the step: there are "
            "no routes of them; expected rollout, or none"
        )
    if correction is None and trainer.off_policy:
        yield (
            f"{setting} with trainer.max_staleness={trainer.max_staleness}, where the ratio is to the engines' "
            "log-probs: there are no routes of the trainer's; expected rollout, an algorithm.correction, or none"
        )
    elif correction is None and trainer.updates_per_step == 1:
        yield (
            f"{setting} with one update a step, whose own routes are those of the old log-probs; expected "
            "trainer.mini_batches or epochs above 1, rollout, or none"
        )


def _of_stream(trainer: TrainerConfig, rollout: RolloutRole) -> Iterator[str]:
    stream = rollout.stream
    if stream is None:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} without rollout.stream, where rollout runs one step "
            "ahead at most; expected 0 or 1, or rollout.stream: {}"
        )
        return
    if stream.left_over == "carry" and not trainer.max_staleness:
        yield (
            "rollout.stream.left_over=carry with trainer.max_staleness=0: what a step leaves would be too old for the "
            "next; expected drop, or a max_staleness above 0"
        )
    if rollout.weights.rolling and not trainer.max_staleness:
        yield (
            "rollout.weights.rolling=true with trainer.max_staleness=0, where engines have nothing to generate while "
            "weights change; expected false, or a max_staleness above 0"
        )
    if rollout.lease and rollout.engine.release_weights:
        yield (
            "rollout.lease=true with rollout.engine.release_weights=true, whose memory goes and comes back for all "
            "engines at once; expected one of them"
        )
    if rollout.lease and stream.engine_restarts:
        yield (
            f"rollout.lease=true with rollout.stream.engine_restarts={stream.engine_restarts}, which was not tried: an "
            "engine may be lost while a model has its device; expected one of them"
        )
    if rollout.weights.rolling and rollout.engine.release_weights:
        yield (
            "rollout.weights.rolling=true with rollout.engine.release_weights=true, whose memory goes and comes back "
            "for all engines at once; expected one of them"
        )


def _of_staleness(algorithm: AlgorithmSettings, trainer: TrainerConfig) -> Iterator[str]:
    """Misfits of samples that the policy before the step made, or did not make."""
    staleness, name = f"trainer.max_staleness={trainer.max_staleness}", f"algorithm.name={algorithm.name}"
    if not trainer.off_policy:
        if algorithm.needs_old_policy and trainer.updates_per_step == 1:
            yield (
                f"{name} with one update a step, of the very policy that made the samples, where it is nothing but the "
                "policy gradient; expected trainer.mini_batches, epochs or max_staleness above that"
            )
        return
    proximal = algorithm.correction is not None and algorithm.correction.against == "proximal"
    if algorithm.kl_guard is not None and not proximal:
        yield (
            f"algorithm.kl_guard is set with {staleness}, where the policy before the step did not make the samples; "
            "expected 0, no kl_guard, or an algorithm.correction, whose ratio is to that policy"
        )
    if algorithm.greedy_baseline:
        yield f"{staleness} with {name}, whose baselines are generated between rollout and update; expected 0"
    if isinstance(algorithm, PreferenceSettings):
        yield f"{staleness} with {name}, which was not tried; expected 0"


def _of_one_update(name: str, trainer: TrainerConfig) -> Iterator[str]:
    if trainer.updates_per_step > 1:
        yield (
            f"trainer.mini_batches={trainer.mini_batches} and epochs={trainer.epochs} with algorithm.name={name}, "
            "whose loss has no ratio to the policy that made the samples: after an update they are another policy's; "
            "expected 1 of each"
        )
    if trainer.max_staleness:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} with algorithm.name={name}, whose loss has no ratio to the "
            "policy that made the samples; expected 0"
        )


def _of_correction(
    algorithm: AlgorithmSettings, correction: CorrectionSettings, trainer: TrainerConfig
) -> Iterator[str]:
    if algorithm.kl_guard is not None and correction.against == "rollout":
        yield (
            "algorithm.kl_guard is set with algorithm.correction.against='rollout', where nothing is held against the "
            "policy before the step; expected 'proximal', or no kl_guard"
        )
    if algorithm.on_policy and correction.against == "rollout":
        yield (
            f"algorithm.correction.against='rollout' with algorithm.name={algorithm.name}, whose loss has no ratio to "
            "any policy; expected 'proximal', with weights"
        )
    older_alone = trainer.max_staleness and trainer.updates_per_step == 1
    if algorithm.needs_old_policy and older_alone and correction.against == "proximal":
        yield (
            f"algorithm.correction.against='proximal' with algorithm.name={algorithm.name} and one update a step, "
            "which starts from the very policy that its ratio is to; expected trainer.mini_batches or epochs above 1, "
            "against='rollout', or no correction"
        )
    if isinstance(algorithm, DistillationSettings) and algorithm.divergence_in == "loss":
        yield (
            "algorithm.correction is set with algorithm.divergence_in='loss', a loss that is exact whoever drew the "
            "tokens; expected divergence_in='reward', or no correction"
        )
    older = []
    if trainer.max_staleness:
        older.append(f"trainer.max_staleness={trainer.max_staleness}")
    if isinstance(algorithm, PFPPOSettings) and algorithm.replay_buffer_size:
        older.append(f"algorithm.replay_buffer_size={algorithm.replay_buffer_size}")
    if older and not correction.corrects:
        yield (
            f"algorithm.correction has neither weights, mask nor veto with {' and '.join(older)}, whose samples are of "
            "older weights: it would only measure what the ratio leaves out; expected one of them, or against='rollout'"
        )


def _of_dynamic_sampling(trainer: TrainerConfig, data: DataConfig) -> Iterator[str]:
    setting = "algorithm.dynamic_sampling=true"
    for source in data.files.train if data.files is not None else ():
        if len(source.weight) > 1:
            yield (
                f"data.files.train: {source.label} has a weight from step {source.weight[1].step} on with {setting}, "
                "where a step draws as many prompts as it needs; expected weights that do not change, or "
                "dynamic_sampling=false"
            )
    if trainer.epochs_of_data is not None:
        yield (
            f"trainer.epochs_of_data={trainer.epochs_of_data:g} with {setting}, where a step draws as many prompts "
            "as it needs; expected trainer.steps, or dynamic_sampling=false"
        )
    if trainer.max_staleness:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} with {setting}, whose further prompts are drawn once the "
            "rewards of the first are known; expected 0, or dynamic_sampling=false"
        )


def _of_length_penalty(algorithm: DAPOSettings, rollout: RolloutRole) -> Iterator[str]:
    limit = rollout.sampling_table.shortest_limit
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > limit:
        where = "adaptive_sampling and its " if rollout.adaptive_sampling else "sampling."
        yield (
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} with rollout.{where}max_new_tokens={limit}, "
            "before which it lies; expected at most as many"
        )


def _of_filtration(algorithm: PFPPOSettings, trainer: TrainerConfig, rollout: RolloutRole) -> Iterator[str]:
    if algorithm.filtration == "best-n" and algorithm.filtration_n > rollout.samples_per_prompt:
        yield (
            f"algorithm.filtration_n={algorithm.filtration_n} with rollout.samples_per_prompt="
            f"{rollout.samples_per_prompt}, expected at most as many"
        )
    if not algorithm.replay_buffer_size:
        return
    setting = f"algorithm.replay_buffer_size={algorithm.replay_buffer_size}"
    if trainer.max_staleness:
        yield (
            f"trainer.max_staleness={trainer.max_staleness} with {setting}, which were not tried together; expected 0, "
            "or replay_buffer_size=0"
        )
    if algorithm.kl_guard is not None:
        yield (
            f"algorithm.kl_guard is set with {setting}, where the policy before the step did not make all samples; "
            "expected no kl_guard, or replay_buffer_size=0"
        )


def pretraining_misfits(algorithm: AlgorithmSettings, steps: int) -> Iterator[str]:
    """Yield the errors of a run whose steps may all be steps that train the critic alone."""
    if isinstance(algorithm, PPOSettings) and algorithm.critic_warmup_steps >= steps:
        yield (
            f"algorithm.critic_warmup_steps={algorithm.critic_warmup_steps} with trainer.steps={steps}, in which the "
            "policy would never learn; expected more steps, or fewer of the critic alone"
        )
