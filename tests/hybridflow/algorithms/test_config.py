"""Settings of the algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine3d.settings import Settings
from hybridflow.algorithms.cispo import CISPOSettings
from hybridflow.algorithms.config import AnyAlgorithm, load
from hybridflow.algorithms.grpo import GRPOSettings
from hybridflow.algorithms.gspo import GSPOSettings
from hybridflow.algorithms.ppo import PPOSettings
from hybridflow.algorithms.registry import ALGORITHMS
from hybridflow.algorithms.sapo import SAPOSettings
from hybridflow.algorithms.settings import AlgorithmSettings
from hybridflow.config.reading.yaml_loader import SettingsError, build_settings
from hybridflow.config.recipe import Recipe


class Part(Settings):
    """The keys of a recipe that these tests need."""

    algorithm: AnyAlgorithm = GRPOSettings()


def build(settings: object) -> AlgorithmSettings:
    return build_settings(Part, {"algorithm": settings}, {}, "recipe").algorithm


def refused(settings: object) -> str:
    """The one line in which settings are refused."""
    with pytest.raises(SettingsError) as error:
        build(settings)
    [line] = error.value.lines
    return line.removeprefix("recipe: ")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "gradient of k1 is zero in expectation"),
        ({"loss_normalising_length": 8}, "expected 'seq-mean-token-sum-norm', or no length"),
        ({"name": "dr_grpo", "loss_aggregation": "token-mean"}, "which divides by no length of responses; expected"),
        ({"name": "gpg", "kl_in": "reward"}, "which asks whether rewards of a group differ; expected 'loss'"),
        ({"name": "pass_at_k", "kl_in": "reward"}, "which only asks whether a reward is above right_above; expected"),
        ({"name": "pass_at_k", "pass_k": 0}, "pass_k = 0: expected at least 1"),
        ({"name": "rloo", "kl_in": "loss", "kl_estimator": "k1", "kl_coef": 0.1}, "gradient of k1 is zero"),
        ({"name": "gpg", "clip_high": 0.3}, "clip_high is set with name 'gpg', which does not use it"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"name": "ppo2"}, "name"),
        ({"clip": 0.2}, "clip"),
        ({"kl_controller": "adaptive", "kl_coef": 0.1}, "kl_target None and kl_coef 0.1, expected a target"),
        ({"kl_controller": "adaptive", "kl_target": 0.1}, "kl_coef 0.0, expected a target, and a coefficient above 0"),
        (
            {"name": "pass_at_k", "dynamic_sampling": True},
            "dynamic_sampling is set with name 'pass_at_k', which does not use it; expected name 'grpo' or",
        ),
        ({"dynamic_sampling_rounds": 3}, "dynamic_sampling_rounds is set with dynamic_sampling false, which does not"),
        (
            {"name": "dapo", "dynamic_sampling": False, "dynamic_sampling_draw": "missing"},
            "expected dynamic_sampling true",
        ),
        (
            {"name": "dapo", "overlong_penalty": 0.5},
            "overlong_penalty is set with overlong_buffer null, which does not",
        ),
        ({"name": "vapo", "gae_lambda": 0.9}, "gae_lambda is set with length_adaptive_alpha, which takes its place"),
        ({"name": "vapo", "positive_lm_coef": 0, "right_above": 1}, "right_above is set with positive_lm_coef 0"),
        (
            {"name": "pf_ppo", "filtration_n": 2},
            "filtration_n is set with filtration 'best-random', which does not use",
        ),
        (
            {"name": "pf_ppo", "replay_buffer_size": 0, "replay_ratio": 0.1},
            "replay_ratio is set with replay_buffer_size 0",
        ),
        ({"name": "pf_ppo", "filter_prob": 1.1}, "filter_prob"),
        (
            {"kl_estimator": "k3+", "kl_in": "reward"},
            "kl_estimator is 'k3+' with kl_in 'reward', where an estimator has no",
        ),
        ({"name": "ppo", "kl_estimator": "k1+"}, "expected 'k1', or kl_in 'loss'"),
        ({"entropy_controller": "adaptive"}, "entropy_controller is 'adaptive' with entropy_target null, expected a"),
        (
            {"entropy_controller": "adaptive", "entropy_target": 0.2, "entropy_coef": 0.01},
            "entropy_coef is 0.01 with entropy_coef_max 0.005, expected at most that",
        ),
        ({"entropy_target": 0.2}, "entropy_target is set with entropy_controller 'fixed', which does not use it"),
        ({"entropy_coef_step": 0.2}, "entropy_coef_step is set with entropy_controller 'fixed', which does not use it"),
        ({"name": "cispo", "clip_high": 0.2}, "clip_high is set with name 'cispo', which does not use it"),
        (
            {"name": "dpo", "loss": "ipo", "label_smoothing": 0.1},
            "label_smoothing is set with loss 'ipo', which does not",
        ),
        ({"name": "dpo", "label_smoothing": 0.5}, "label_smoothing"),
        ({"name": "dpo", "beta": 0.0}, "beta"),
        (
            {"name": "dpo", "kl_coef": 0.1},
            "kl_coef is set with name 'dpo', which does not use it; expected another name",
        ),
        ({"name": "kto", "entropy_coef": 0.1}, "entropy_coef is set with name 'kto', which does not use it"),
        (
            {"name": "kto", "correction": {"weights": "token"}},
            "correction is set with name 'kto', which does not use it",
        ),
        ({"name": "kto", "pairs": "file"}, "pairs is set with name 'kto', which does not use it; expected name 'dpo'"),
        (
            {"name": "grpo", "beta": 0.1},
            "beta is set with name 'grpo', which does not use it; expected name 'dpo' or 'kto', kl_coef, or no beta",
        ),
        ({"name": "kl_cov", "dual_clip": 3.0}, "dual_clip is set with name 'kl_cov', which does not use it"),
        ({"name": "sapo", "weight_clip_high": 0.2}, "expected name 'cispo', or no weight_clip_high"),
        ({"name": "sapo", "gate_temperature_negative": 0.0}, "gate_temperature_negative = 0.0: expected more than 0"),
        (
            {"name": "clip_cov", "clip_cov_low": 6.0},
            "clip_cov_low is 6.0 with clip_cov_high 5.0, expected at most that",
        ),
        ({"name": "clip_cov", "clip_cov_fraction": 0.0}, "clip_cov_fraction = 0.0: expected more than 0"),
        (
            {"name": "safe_rlhf", "lagrange_initial": 6.0},
            "lagrange_initial is 6.0, expected between lagrange_min, 0.05, and lagrange_max, 5.0",
        ),
    ],
)
def test_algorithm_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    assert message in refused(settings)


def test_the_default_is_grpo() -> None:
    assert Recipe.model_fields["algorithm"].default == Part().algorithm == build({}) == GRPOSettings()
    assert isinstance(build({"kl_coef": 0.1}), GRPOSettings)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_there_and_needs_a_reference_only_where_it_is_asked_for(name: str) -> None:
    config = build({"name": name})
    assert type(config) is load(name).settings
    assert config.name == name
    assert not config.needs_reference


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("grpo", {"group_baseline"}),
        ("ppo", {"needs_critic"}),
        ("remax", {"greedy_baseline"}),
        ("safe_rlhf", {"needs_critic", "needs_cost"}),
        ("dapo", {"group_baseline"}),
        ("vapo", {"needs_critic"}),
        ("pf_ppo", {"needs_critic", "group_baseline"}),
        ("distillation", {"needs_teacher"}),
        ("rloo", {"group_baseline"}),
        ("reinforce_plus_plus", set()),
        ("reinforce_plus_plus_baseline", {"group_baseline"}),
        ("dr_grpo", {"group_baseline"}),
        ("gpg", {"group_baseline", "on_policy"}),
        ("opo", {"group_baseline", "on_policy"}),
        ("pass_at_k", {"group_baseline"}),
        ("gspo", {"group_baseline"}),
        ("gspo_token", {"group_baseline"}),
        ("cispo", {"group_baseline"}),
        ("sapo", {"group_baseline"}),
        ("clip_cov", {"group_baseline"}),
        ("kl_cov", {"group_baseline", "needs_old_policy"}),
        ("dpo", set()),
        ("kto", set()),
        ("ippo", {"needs_critic"}),
    ],
)
def test_what_the_published_algorithms_need(name: str, needs: set[str]) -> None:
    flags = (
        *("needs_critic", "needs_cost", "needs_teacher", "needs_old_policy"),
        *("group_baseline", "greedy_baseline", "on_policy"),
    )
    assert {flag for flag in flags if getattr(load(name).settings, flag)} == needs


def _users(key: str) -> str:
    return " or ".join(repr(name) for name in ALGORITHMS if key in load(name).settings.model_fields)


def test_a_key_of_another_algorithm_is_refused_in_one_line() -> None:
    assert "'ppo'" in _users("gamma")
    assert "'grpo'" not in _users("gamma")
    assert refused({"gamma": 1.0}) == (  # the default, but somebody wrote it
        f"algorithm: gamma is set with name 'grpo', which does not use it; expected name {_users('gamma')}, or no gamma"
    )
    keys = ("normalise_advantages_by_std", "cost_limit")
    assert refused(
        {"name": "remax", "cost_limit": 1.0, "normalise_advantages_by_std": True}
    ) == "algorithm: " + "; ".join(
        f"{key} is set with name 'remax', which does not use it; expected name {_users(key)}, or no {key}"
        for key in keys
    )
    assert refused({"name": "cispo", "dual_clip": 3.0}).startswith("algorithm: dual_clip is set with name 'cispo'")
    assert refused({"gamma": 1.0, "clip_low": 2.0}) == "algorithm.clip_low = 2.0: expected less than 1.0"
    assert "kl_horizon is set with kl_controller 'fixed', which does not use it" in refused({"kl_horizon": 100})


SAMPLING = ("dynamic_sampling_rounds", "dynamic_sampling_draw", "dynamic_sampling_at_limit")
OF_GROUPS = ("normalise_advantages_by_std", "dynamic_sampling")
USED = {
    "distillation": {"divergence_in", "reward_coef"},
    "grpo": {"normalise_advantages_by_std", "dynamic_sampling"},
    "dapo": {"dynamic_sampling", *SAMPLING, "overlong_filter", "overlong_buffer"},
    "vapo": {
        *("gamma", "value_clip", "whiten_advantages", "critic_warmup_steps"),
        *("critic_gae_lambda", "length_adaptive_alpha", "positive_lm_coef", "right_above"),
    },
    "pf_ppo": {
        *("gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"),
        *("filtration", "filter_prob", "replay_buffer_size", "replay_ratio", "replay_max_age"),
    },
    "ppo": {"gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"},
    "ippo": {"gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"},
    "remax": set(),
    "gspo": {*OF_GROUPS},
    "gspo_token": {*OF_GROUPS},
    "cispo": {*OF_GROUPS, "weight_clip_low", "weight_clip_high"},
    "sapo": {*OF_GROUPS, "gate_temperature_positive", "gate_temperature_negative"},
    "clip_cov": {*OF_GROUPS, "clip_cov_fraction", "clip_cov_low", "clip_cov_high"},
    "kl_cov": {*OF_GROUPS, "kl_cov_fraction", "kl_cov_coef"},
    "safe_rlhf": {
        *("gamma", "gae_lambda", "value_clip", "whiten_advantages", "critic_warmup_steps"),
        *("cost_limit", "lagrange_initial", "lagrange_lr", "lagrange_max"),
    },
    "rloo": {"dynamic_sampling"},
    "reinforce_plus_plus": {"gamma"},
    "reinforce_plus_plus_baseline": {"dynamic_sampling"},
    "dr_grpo": {"dynamic_sampling"},
    "gpg": {"dynamic_sampling"},
    "opo": {"dynamic_sampling"},
    "pass_at_k": {"pass_k", "right_above"},
}


def test_the_settings_of_every_algorithm_are_written() -> None:
    assert USED.keys() == {name for name in ALGORITHMS if load(name).preference_loss is None}  # those have other keys


@pytest.mark.parametrize("name", USED)
def test_settings_that_were_written_are_read_again(name: str) -> None:
    shard = build_settings(Part, {"algorithm": {"name": name, "kl_coef": 0.1}}, {}, "recipe")
    written = shard.model_dump(mode="json")["algorithm"]
    assert set().union(*USED.values()) & written.keys() == USED[name]
    assert build(written) == shard.algorithm
    adaptive = Part(algorithm=build(written | {"kl_controller": "adaptive", "kl_target": 0.1}))
    assert adaptive.model_dump(mode="json")["algorithm"].keys() - written.keys() == {"kl_target", "kl_horizon"}
    adaptive = Part(algorithm=build(written | {"entropy_controller": "adaptive", "entropy_target": 0.1}))
    of_entropy = {"entropy_target", "entropy_coef_step", "entropy_coef_max"}
    assert adaptive.model_dump(mode="json")["algorithm"].keys() - written.keys() == of_entropy
    assert build(adaptive.model_dump(mode="json")["algorithm"]) == adaptive.algorithm


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"name": "dpo"}, {"pairs", "loss", "beta", "label_smoothing", "length_normalisation", "nll_coef"}),
        ({"name": "dpo", "loss": "ipo"}, {"pairs", "loss", "beta", "length_normalisation", "nll_coef"}),
        ({"name": "kto"}, {"beta", "desirable_weight", "undesirable_weight"}),
    ],
)
def test_settings_of_preferences_are_those_that_are_used(settings: dict[str, object], names: set[str]) -> None:
    config = build(settings)
    written = Part(algorithm=config).model_dump(mode="json")["algorithm"]
    assert written.keys() == {"name", "schedules"} | names
    assert build(written) == config


CLIP = {"clip_low", "clip_high", "dual_clip"}


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (CLIP, ("grpo", "ppo", "remax", "safe_rlhf", "gspo", "gspo_token", "clip_cov")),
        (set(), ("cispo", "sapo", "kl_cov")),
    ],
)
def test_algorithms_with_the_clipped_surrogate_have_clip_higher_and_dual_clip(
    keys: set[str], names: Sequence[str]
) -> None:
    for name in names:
        assert CLIP & load(name).settings.model_fields.keys() == keys


def test_defaults_are_those_of_the_papers() -> None:
    gspo, cispo, sapo = build({"name": "gspo"}), build({"name": "cispo"}), build({"name": "sapo"})
    assert isinstance(gspo, GSPOSettings)
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert isinstance(cispo, CISPOSettings)
    assert (cispo.weight_clip_low, cispo.weight_clip_high) == (None, 0.2)
    assert isinstance(sapo, SAPOSettings)
    assert (sapo.gate_temperature_positive, sapo.gate_temperature_negative) == (1.0, 1.05)
    for name in ("gspo", "gspo_token", "cispo", "sapo", "clip_cov", "kl_cov"):
        assert (build({"name": name}).kl_in, build({"name": name}).kl_estimator) == ("loss", "k3")


def test_where_the_kl_is_a_penalty_depends_on_the_algorithm_and_the_estimator_on_that() -> None:
    def kl_settings(**settings: object) -> tuple[str, str]:
        config = build(settings)
        return config.kl_in, config.kl_estimator

    assert kl_settings() == kl_settings(name="grpo") == kl_settings(name="ppo", kl_in="loss") == ("loss", "k3")
    assert kl_settings(name="ppo") == kl_settings(name="remax") == kl_settings(name="safe_rlhf") == ("reward", "k1")
    assert (
        kl_settings(name="rloo")
        == kl_settings(name="opo")
        == kl_settings(name="reinforce_plus_plus")
        == ("reward", "k1")
    )
    assert kl_settings(name="dr_grpo") == kl_settings(name="gpg") == kl_settings(name="pass_at_k") == ("loss", "k3")
    assert kl_settings(name="reinforce_plus_plus_baseline") == ("loss", "k2")
    assert kl_settings(name="reinforce_plus_plus_baseline", kl_in="reward") == ("reward", "k1")
    assert kl_settings(kl_in="reward") == ("reward", "k1")
    assert kl_settings(name="ppo", kl_estimator="k2") == ("reward", "k2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"top_k": 4},
            "top_k is set with divergence_in 'reward', which does not use it; expected divergence_in 'loss'",
        ),
        ({"divergence": "jsd"}, "divergence is set with divergence_in 'reward', which does not use it"),
        (
            {"divergence_in": "loss", "jsd_beta": 0.2},
            "with divergence 'reverse_kl', which does not use it; expected div",
        ),
        ({"divergence_in": "loss", "clip_low": 0.1}, "clip_low is set with reward_coef 0.0, which does not use it"),
        (
            {"normalise_advantages_by_std": False},
            "reward_coef 0.0, which does not use it; expected reward_coef above 0",
        ),
        ({"kl_coef": 0.1, "kl_in": "reward"}, "kl_in is 'reward' with reward_coef 0, where rewards are only measured"),
        ({"divergence_in": "loss", "top_k": 0}, "top_k"),
        ({"gamma": 1.0}, "gamma is set with name 'distillation', which does not use it"),
    ],
)
def test_settings_of_distillation_without_a_use_are_refused(settings: dict[str, object], message: str) -> None:
    assert message in refused({"name": "distillation", **settings})


def test_settings_of_distillation_are_written_where_they_are_used() -> None:
    def written(**settings: object) -> set[str]:
        config = Part(algorithm=build({"name": "distillation", **settings}))
        keys = config.model_dump(mode="json")["algorithm"]
        assert build(keys) == config.algorithm
        return keys.keys() - written_always

    written_always = Part().model_dump(mode="json")["algorithm"].keys() - {
        *("normalise_advantages_by_std", "clip_low", "clip_high", "dual_clip"),
    }
    always, clip = {"divergence_in", "reward_coef"}, {"clip_low", "clip_high", "dual_clip"}
    in_loss = always | {"divergence", "top_k", "top_k_of"}
    assert written() == always | clip
    assert written(divergence_in="loss") == in_loss
    assert written(divergence_in="loss", divergence="jsd") == in_loss | {"jsd_beta"}
    assert written(divergence_in="loss", reward_coef=0.5) == in_loss | clip | {"normalise_advantages_by_std"}


def test_a_wrong_name_is_one_error() -> None:
    expected = f"expected {' or '.join(map(repr, ALGORITHMS))}, or 'file.py:ALGORITHM' of a file of your own"
    assert refused({"name": "pp0"}) == f"algorithm.name: 'pp0' is no algorithm, {expected}"
    assert refused({"name": "pp0", "gamma": 1.0}) == f"algorithm.name: 'pp0' is no algorithm, {expected}"
    assert refused({"name": 1}).startswith("algorithm.name = 1: expected text")
    assert refused(["ppo"]).startswith("algorithm = ['ppo']: expected the keys name, ")
    with pytest.raises(ValueError, match="'grpo' with the settings of 'ppo', expected 'ppo'"):
        PPOSettings(name="grpo")


def test_the_aggregations_of_the_papers_are_the_defaults() -> None:
    results = {name: build({"name": name}).loss_aggregation for name in ALGORITHMS}
    others = {name: mode for name, mode in results.items() if mode != "token-mean"}
    assert others == {
        **{"rloo": "seq-mean-token-sum", "dr_grpo": "seq-mean-token-sum-norm"},
        **dict.fromkeys(("gspo", "gspo_token", "sapo"), "seq-mean-token-mean"),
    }


def test_the_constant_that_divides_a_loss_is_the_longest_response_unless_it_is_set() -> None:
    assert build({"name": "dr_grpo"}).normalising_length(512) == 512
    assert build({"name": "dr_grpo", "loss_normalising_length": 100}).normalising_length(512) == 100
    assert build({"loss_aggregation": "seq-mean-token-sum-norm"}).normalising_length(7) == 7
    assert build({"name": "dr_grpo", "loss_aggregation": "seq-mean-token-sum"}).normalising_length(512) is None


def test_an_unknown_key_is_one_error_that_names_what_is_near() -> None:
    assert refused({"name": "ppo", "gama": 1.0}) == "unknown key algorithm.gama: did you mean algorithm.gamma?"


def test_reference_is_needed_only_with_a_kl_coefficient() -> None:
    assert not build({}).needs_reference
    assert build({"kl_coef": 0.1}).needs_reference
