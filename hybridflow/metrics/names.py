"""Names of metrics.

A name is `group/figure_unit`. A step is counted within its phase: "train", or another such as "sft" for a warm-up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

ROLLOUT_THROUGHPUT = "rollout/throughput_tokens_per_sec"
ROLLOUT_WAIT_TIME = "rollout/wait_ms"
ROLLOUT_STALENESS = "rollout/staleness_mean"
STREAM_EVICTED = "stream/evicted_groups"
STREAM_DROPPED = "stream/dropped_groups"
STREAM_CARRIED = "stream/carried_groups"
STREAM_LOST = "stream/lost_groups"
STREAM_LOST_ENGINES = "stream/lost_engines"
"""That died or came no further, and are started again."""
STREAM_WITHDRAWN = "stream/withdrawn_requests"
"""Responses that were taken from engines whose devices went back to the trainer, to go on with what they had."""
STREAM_LENT_TIME = "stream/lent_ms"
"""In which engines on the trainer's devices took requests."""
STREAM_LEND_TIME = "stream/lend_ms"
"""Until they could: the trainer's models gave memory back, and engines had theirs again."""
STREAM_WITHDRAW_TIME = "stream/withdraw_ms"
"""Until nothing was in flight at them any more."""
STREAM_WAIT_TIME = "stream/trainer_wait_ms"
STREAM_WAIT_SHARE = "stream/trainer_wait_share"
STREAM_THROUGHPUT = "stream/throughput_tokens_per_sec"
STREAM_BUSY = "stream/engines_busy_share"
STREAM_TOKENS_IN_FLIGHT = "stream/tokens_in_flight_mean"
STREAM_REQUESTS_IN_FLIGHT = "stream/requests_in_flight_mean"
STREAM_REQUEST_LIMIT = "stream/request_limit_mean"
"""That an engine may have in flight, in the mean of the engines, where it follows the room in their KV caches."""
STREAM_WAITING_REQUESTS = "stream/waiting_requests"
"""Of the controller, for which no engine has room."""
STREAM_QUEUED_REQUESTS = "stream/queued_requests_mean"
"""In the queues of the engines themselves, in the mean over time."""
STREAM_CACHE_USE = "stream/cache_use_share"
"""Share of an engine's KV cache that requests hold, in the mean over the batches of all engines."""
STREAM_CACHE_USE_MAX = "stream/cache_use_max"
"""The largest such share of an engine, in the mean over what it ran until it told the controller again."""
STREAM_RETRACTED = "stream/retracted_requests"
"""Requests that an engine took back to its queue as its KV cache was full."""
STREAM_PREFIX_HITS = "stream/prefix_hit_share"
"""Share of the tokens that requests were sent with which the engine's KV cache had."""
STREAM_RESENT = "stream/resent_samples"
"""Responses that were aborted and sent again with what they had, because weights changed."""
STREAM_CONTINUED = "stream/continued_samples"
"""Responses that stood still while weights changed, and went on."""
STREAM_AGE_MEAN = "stream/sample_age_mean_sec"
"""Seconds from the end of a response to the step that learns from it; after a restart from there on."""
STREAM_AGE_MAX = "stream/sample_age_max_sec"
STREAM_READY_GROUPS = "stream/ready_groups"
STREAM_WAITING_REWARDS = "stream/waiting_rewards"
STREAM_GROUPS_UNDER_WAY = "stream/groups_under_way"
STREAM_STALENESS_MAX = "stream/staleness_max"
STREAM_MIXED_SHARE = "stream/mixed_versions_share"
ROLLOUT_TIME = "rollout/time_ms"
ROLLOUT_RESPONSE_LENGTH = "rollout/response_length_mean"
ROLLOUT_TRUNCATED = "rollout/truncated_fraction"
BASELINE_TIME = "rollout/baseline_time_ms"
REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"
REWARD_LATENCY = "reward/latency_ms"
JUDGE_RESTARTS = "judge/restarts"
REWARD_DROPPED = "reward/dropped"
DISTILLATION_KL_K1 = "distillation/kl_k1"
DISTILLATION_KL_K3 = "distillation/kl_k3"
DISTILLATION_DIVERGENCE = "distillation/divergence"
DISTILLATION_AGREEMENT = "distillation/teacher_agreement"
DISTILLATION_TEACHER_TIME = "distillation/teacher_time_ms"
REWARD_PASS_AT_K = "reward/pass_at_k"
REWARD_VALID_FRACTION = "reward/valid_fraction"
COST_MULTIPLIER = "cost/multiplier"
REWARD_OVERLONG = "reward/overlong_penalty_mean"
SAMPLING_ROUNDS = "sampling/rounds"
SAMPLING_DRAWN = "sampling/drawn_prompts"
SAMPLING_USED = "sampling/used_prompts"
SAMPLING_FILTERED = "sampling/filtered_prompts"
SAMPLING_FAILED = "sampling/failed_prompts"
SAMPLING_SURPLUS = "sampling/surplus_prompts"
SAMPLING_ALL_RIGHT = "sampling/all_right_fraction"
SAMPLING_ALL_WRONG = "sampling/all_wrong_fraction"
SAMPLING_OVERLONG = "sampling/overlong_fraction"
SAMPLING_KEPT = "sampling/kept_fraction"
REPLAY_SIZE = "replay/size"
REPLAY_AGE = "replay/age_mean"
REPLAY_SHARE = "replay/share"
TRAIN_STEP_TIME = "train/step_time_ms"
TRAIN_UPDATE_TIME = "train/update_time_ms"
TRAIN_OPTIMIZER_TIME = "train/optimizer_time_ms"
TRAIN_AGAIN = "train/computed_again"
TRAIN_LOSS = "train/loss"
TRAIN_POLICY_LOSS = "train/policy_loss"
TRAIN_RATIO = "train/ratio_mean"
TRAIN_CLIP_FRACTION_LOW = "train/clip_fraction_low"
TRAIN_CLIP_FRACTION_HIGH = "train/clip_fraction_high"
TRAIN_CLIP_FRACTION_DUAL = "train/clip_fraction_dual"
TRAIN_GATE_SLOPE = "train/gate_slope_mean"
TRAIN_SELECTED_FRACTION = "train/selected_fraction"
TRAIN_KL_K1 = "train/approx_kl_k1"
TRAIN_KL_K3 = "train/approx_kl_k3"
TRAIN_KL_COEF = "train/kl_coef"
TRAIN_ENTROPY_COEF = "train/entropy_coef"
TRAIN_REFERENCE_KL = "train/reference_kl"
TRAIN_REFERENCE_KL_CAPPED = "train/reference_kl_capped"
TRAIN_POSITIVE_SHARE = "train/positive_share"
TRAIN_POSITIVE_NLL = "train/positive_nll"
TRAIN_ENTROPY = "train/entropy"
TRAIN_GRADIENT_NORM = "train/gradient_norm"
TRAIN_LEARNING_RATE = "train/learning_rate"
TRAIN_SKIPPED_UPDATES = "train/skipped_updates"
TRAIN_REFUSED_UPDATES = "train/refused_updates"
TRAIN_PADDING_SHARE = "train/padding_share"
TRAIN_DEVICE_THROUGHPUT = "train/device_tokens_per_sec"
TRAIN_MFU = "train/mfu"
TRAIN_EXPERT_LOAD_MAX = "train/expert_load_max"
TRAIN_EXPERT_LOAD_MAX_LAYER = "train/expert_load_max_layer"
TRAIN_EXPERT_LOAD_MAX_MEAN = "train/expert_load_max_mean"
TRAIN_EXPERT_LOAD_MIN = "train/expert_load_min"
TRAIN_ROUTER_Z_LOSS = "train/router_z_loss"
TRAIN_SEQUENCE_BALANCE_LOSS = "train/sequence_balance_loss"
TRAIN_UPDATE_BALANCE_LOSS = "train/update_balance_loss"
PREFERENCE_LOSS = "preference/loss"
PREFERENCE_ACCURACY = "preference/accuracy"
"""Share of the pairs whose better response has the larger implicit reward; a tie counts half. Of unpaired examples: of
those whose reward is on the right side of z0."""
PREFERENCE_MARGIN = "preference/margin"
"""Of pairs: implicit reward of the better response less that of the other."""
PREFERENCE_CHOSEN_REWARD = "preference/chosen_reward"
"""beta * (log-prob by the policy - by the reference) of the better, or desirable, responses."""
PREFERENCE_REJECTED_REWARD = "preference/rejected_reward"
PREFERENCE_CHOSEN_LOGPROB = "preference/chosen_logprob"
"""Of whole responses, by the policy."""
PREFERENCE_REJECTED_LOGPROB = "preference/rejected_logprob"
PREFERENCE_Z0 = "preference/z0"
"""KTO's estimate of the KL divergence from the reference, in nats a response."""
PREFERENCE_EXAMPLES = "preference/examples"
"""Pairs, or unpaired examples, that a step learned from."""
PREFERENCE_WITHOUT_DIFFERENCE = "preference/groups_without_difference"
"""Groups whose rewards are all alike, which make no pair."""
STEP_DEVICE_THROUGHPUT = "step/device_tokens_per_sec"
INFERENCE_TIME = "inference/time_ms"
MISMATCH_LOGPROB_MEAN = "mismatch/logprob_abs_diff_mean"
MISMATCH_LOGPROB_MAX = "mismatch/logprob_abs_diff_max"
CORRECTION_KL_K1 = "correction/kl_k1"
CORRECTION_KL_K3 = "correction/kl_k3"
CORRECTION_CHI_SQUARE_TOKEN = "correction/chi_square_token"
CORRECTION_CHI_SQUARE_SEQUENCE = "correction/chi_square_sequence"
CORRECTION_EFFECTIVE_TOKENS = "correction/effective_tokens"
CORRECTION_EFFECTIVE_SAMPLES = "correction/effective_samples"
CORRECTION_WEIGHT_MEAN = "correction/weight_mean"
CORRECTION_WEIGHT_MIN = "correction/weight_min"
CORRECTION_WEIGHT_MAX = "correction/weight_max"
CORRECTION_TRUNCATED = "correction/truncated_fraction"
CORRECTION_MASKED_LOW = "correction/masked_low_fraction"
CORRECTION_MASKED_HIGH = "correction/masked_high_fraction"
CORRECTION_VETOED = "correction/vetoed_fraction"
CORRECTION_LOST_SAMPLES = "correction/lost_samples"
CORRECTION_EMPTY_UPDATES = "correction/empty_updates"
SYNC_TIME = "sync/time_ms"
SYNC_BYTES_MOVED = "sync/moved_bytes"
SYNC_BYTES_ALIASED = "sync/aliased_bytes"
SYNC_ONE_SIDED_BYTES = "sync/one_sided_bytes"
SYNC_ONE_SIDED_TIME = "sync/one_sided_ms"
SYNC_COLLECTIVE_BYTES = "sync/collective_bytes"
SYNC_COLLECTIVE_TIME = "sync/collective_ms"
SYNC_MEMORY_TIME = "sync/memory_ms"
SYNC_BEGIN_TIME = "sync/begin_ms"
SYNC_SEND_TIME = "sync/send_ms"
SYNC_SEAL_TIME = "sync/seal_ms"
SYNC_VERIFY_TIME = "sync/verify_ms"
SYNC_COMMIT_TIME = "sync/commit_ms"
SYNC_PAUSE_SUM = "sync/pause_sum_ms"
"""In which engines could not generate because their weights changed, added up."""
SYNC_PAUSE_MAX = "sync/pause_max_ms"
"""Of the engine for which it was longest."""
DEVICE_UTILISATION = "device/utilisation_mean"
DEVICE_POWER = "device/power_mean_w"
DEVICE_MEMORY = "device/memory_peak_mb"
DEVICE_ENERGY = "device/energy_j"
ACTOR_GPU_MEMORY = "memory/actor_gpu_mem_mb"
ACTOR_GPU_RESERVED = "memory/actor_gpu_reserved_mb"
SFT_LOSS = "sft/loss"
EVAL_WAIT_TIME = "eval/wait_ms"
"""Time for which a step's weights waited for the end of an asynchronous evaluation."""
EVAL = "eval"
"""Name of the set of held-out prompts of `data`, whose metrics are `eval/FIGURE`."""
SET_PROMPTS, SET_SAMPLES, SET_TIME = "prompts", "samples", "time_ms"
"""Of a set of `evaluation`, as `of_set` names it: prompts and responses in its figures, and how long it took."""
SET_LEFT_OUT = "left_out_samples"
"""Responses that are in none, since what scores them failed."""
SET_TRAINING = "training_prompts"
"""Prompts of the set that the model learns from too."""
SAMPLES_BYTES = "samples/written_bytes"
"""Of the sample store: of the steps that were written since the last one was logged. The next is of the same."""
SAMPLES_TIME = "samples/write_ms"
CHECKPOINT_STALL = "checkpoint/stall_ms"
CHECKPOINT_BYTES = "checkpoint/written_bytes"
CHECKPOINT_HOST_BYTES = "checkpoint/host_bytes"
CHECKPOINT_SECONDS = "checkpoint/whole_after_sec"
CHECKPOINT_FAILED = "checkpoint/failed"
CHECKPOINT_BEST_STEP, CHECKPOINT_BEST_VALUE = "checkpoint/best_step", "checkpoint/best_value"
"""Of the best checkpoint so far by `checkpoint.keep_best`: its step, and its value."""


@dataclass(frozen=True)
class UpdateNames:
    """What the figures are called that the optimizer steps of any model have."""

    gradient_norm: str
    learning_rate: str
    skipped_updates: str
    padding_share: str
    optimizer_time: str
    """Of a step's updates what they took after the gradient's norm was known, of the slowest rank: the optimizer's
    step, and the way of a state that is in host memory."""
    again: str
    """How often all micro-batches of an update were computed again, since a layer had too little room for the rows of
    its experts; only with `expert_rows_ahead`."""
    device_throughput: str
    """Tokens a second and device of the ranks that update the model, while they do."""
    mfu: str
    """Model FLOP/s over what the devices can do: recomputation, padding and waiting for others count for nothing."""
    gpu_memory: str
    """The most that tensors have taken of a GPU, in MiB."""
    gpu_reserved: str
    """The most that PyTorch has taken of a GPU for them, in MiB: with what lies between tensors unused."""
    expert_load_max: str
    """Tokens of an update that the most loaded expert of a layer was given, over the mean of the layer's experts: the
    mean over updates, of the layer where that is highest. These and the next only where there are experts; padding is
    no load."""
    expert_load_max_layer: str
    """The number of that layer, from 0."""
    expert_load_max_mean: str
    """The mean over all layers of what `expert_load_max` is the highest of."""
    expert_load_min: str
    """Tokens of the least loaded expert of all layers and updates, over the mean of its layer's experts."""
    router_z_loss: str
    """This loss and the next two are means over layers, without coefficients, and only where their coefficients are
    above 0; `engine3d.models.experts.load_balance` has the formulas."""
    sequence_balance_loss: str
    """1 where the experts are loaded alike in every sequence."""
    update_balance_loss: str
    """1 where they are in the whole update."""
    host_memory: str
    """The most that a process has taken of its host's memory, in MiB, where it computes on CPUs."""


@dataclass(frozen=True)
class CriticNames(UpdateNames):
    """What the figures of a critic are called."""

    value_loss: str
    clip_fraction: str
    value_mean: str
    return_mean: str
    explained_variance: str

    @classmethod
    def of(cls, role: str) -> CriticNames:
        """Those of the critic that has this role, in a group of that name."""
        groups = {field.name: f"{role}/{field.name}" for field in fields(cls)}
        elsewhere = {
            "gpu_memory": f"memory/{role}_gpu_mem_mb",
            "gpu_reserved": f"memory/{role}_gpu_reserved_mb",
            "host_memory": f"memory/{role}_host_mem_mb",
            "device_throughput": f"{role}/device_tokens_per_sec",
            "optimizer_time": f"{role}/optimizer_time_ms",
            "again": f"{role}/computed_again",
        }
        return cls(**groups | elsewhere)


ACTOR = UpdateNames(
    gradient_norm=TRAIN_GRADIENT_NORM,
    learning_rate=TRAIN_LEARNING_RATE,
    skipped_updates=TRAIN_SKIPPED_UPDATES,
    padding_share=TRAIN_PADDING_SHARE,
    optimizer_time=TRAIN_OPTIMIZER_TIME,
    again=TRAIN_AGAIN,
    device_throughput=TRAIN_DEVICE_THROUGHPUT,
    mfu=TRAIN_MFU,
    gpu_memory=ACTOR_GPU_MEMORY,
    gpu_reserved=ACTOR_GPU_RESERVED,
    expert_load_max=TRAIN_EXPERT_LOAD_MAX,
    expert_load_max_layer=TRAIN_EXPERT_LOAD_MAX_LAYER,
    expert_load_max_mean=TRAIN_EXPERT_LOAD_MAX_MEAN,
    expert_load_min=TRAIN_EXPERT_LOAD_MIN,
    router_z_loss=TRAIN_ROUTER_Z_LOSS,
    sequence_balance_loss=TRAIN_SEQUENCE_BALANCE_LOSS,
    update_balance_loss=TRAIN_UPDATE_BALANCE_LOSS,
    host_memory="memory/actor_host_mem_mb",
)
CRITIC = CriticNames.of("critic")
COST_CRITIC = CriticNames.of("cost_critic")


def coefficient(setting: str) -> str:
    """Of a setting of the algorithm that changes from step to step."""
    return f"train/{setting}"


def of_set(name: str, figure: str) -> str:
    """Metric of a held-out set; figures are those of `evaluation_statistics` and the `SET_...` above."""
    return f"eval/{figure}" if name == EVAL else f"eval/{name}/{figure}"


def set_of(metric: str) -> tuple[str, str] | None:
    """The set and the figure that `of_set` names so; None for another metric."""
    found = re.fullmatch(r"eval/(?:([^/]+)/)?([^/]+)", metric)
    return (found[1] or EVAL, found[2]) if found is not None else None


def of_source(name: str, figure: str) -> str:
    """Of the samples whose prompts are of one source of `data.files.train`."""
    return f"data/{name}/{figure}"
