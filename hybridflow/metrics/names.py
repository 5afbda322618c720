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
"""Engines that died or hung, and are started again."""
STREAM_RECLAIMED = "stream/reclaimed_requests"
"""Responses taken from engines whose devices went back to the trainer, to continue with their tokens."""
STREAM_LEASED_TIME = "stream/leased_ms"
"""Time for which engines on leased devices took requests."""
STREAM_LEASE_START_TIME = "stream/lease_start_ms"
"""Until they could: the trainer's models gave memory back, and engines had theirs again."""
STREAM_RECLAIM_TIME = "stream/reclaim_ms"
"""Until nothing was in flight at them any more."""
STREAM_WAIT_TIME = "stream/trainer_wait_ms"
STREAM_WAIT_SHARE = "stream/trainer_wait_share"
STREAM_THROUGHPUT = "stream/throughput_tokens_per_sec"
STREAM_BUSY = "stream/engines_busy_share"
STREAM_TOKENS_IN_FLIGHT = "stream/tokens_in_flight_mean"
STREAM_REQUESTS_IN_FLIGHT = "stream/requests_in_flight_mean"
STREAM_REQUEST_LIMIT = "stream/request_limit_mean"
"""Most requests in flight at an engine, mean over engines, where it follows the free capacity of their KV caches."""
STREAM_WAITING_REQUESTS = "stream/waiting_requests"
"""Requests in the controller's queue, for which no engine has capacity."""
STREAM_QUEUED_REQUESTS = "stream/queued_requests_mean"
"""Requests in the queues of the engines, mean over time."""
STREAM_CACHE_USE = "stream/cache_use_share"
"""Share of an engine's KV cache that requests hold, in the mean over the batches of all engines."""
STREAM_CACHE_USE_MAX = "stream/cache_use_max"
"""The largest such share of an engine, in the mean over what it ran until its next report to the controller."""
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
STREAM_GROUPS_IN_FLIGHT = "stream/groups_in_flight"
STREAM_STALENESS_MAX = "stream/staleness_max"
STREAM_MIXED_SHARE = "stream/mixed_versions_share"
ROUTES_MISSING_SHARE = "rollout/missing_routes_share"
"""Share of the tokens, but for the last of each sample, whose routes no engine knows."""
ROUTES_OLDER_SHARE = "rollout/older_routes_share"
"""Share of the response tokens that older weights have drawn than those before the step. Their routes are of these
weights, and are replayed as all others."""
ROUTES_MB = "rollout/routes_mb"
"""Megabytes of the routes of a step's samples."""
ROLLOUT_ACCEPTANCE_LENGTH = "rollout/acceptance_length_mean"
"""Tokens that a request gets of a forward pass that verifies drafts: those accepted, and the next one. Requests of
evaluations count, too."""
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
SAMPLING_COUNTS = (
    SAMPLING_ROUNDS,
    SAMPLING_DRAWN,
    SAMPLING_USED,
    SAMPLING_FILTERED,
    SAMPLING_FAILED,
    SAMPLING_SURPLUS,
)
"""Counts, which those of several rollouts of a step are added to."""
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
TRAIN_CAPACITY_RETRIES = "train/capacity_retries"
TRAIN_PIPELINE_BUBBLE = "train/pipeline_bubble"
TRAIN_SPLIT_SHARE = "train/split_share"
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
TRAIN_MTP_LOSS = "train/mtp_loss"
TRAIN_MTP_GRADIENT_NORM = "train/mtp_grad_norm"
TRAIN_REFUSED_UPDATES = "train/refused_updates"
TRAIN_PADDING_SHARE = "train/padding_share"
TRAIN_DEVICE_THROUGHPUT = "train/device_tokens_per_sec"
TRAIN_MFU = "train/mfu"
TRAIN_EXPERT_LOAD_MAX = "train/expert_load_max"
TRAIN_EXPERT_LOAD_MAX_LAYER = "train/expert_load_max_layer"
TRAIN_EXPERT_LOAD_MAX_MEAN = "train/expert_load_max_mean"
TRAIN_EXPERT_LOAD_MIN = "train/expert_load_min"
TRAIN_EXPERT_LOAD_ENTROPY = "train/expert_load_entropy"
TRAIN_EXPERT_LOAD_ENTROPY_MIN = "train/expert_load_entropy_min"
TRAIN_DEAD_EXPERTS = "train/dead_experts"
TRAIN_EXPERT_BIAS_SPREAD = "train/expert_bias_spread"
TRAIN_EXPERT_BIAS_SPREAD_MEAN = "train/expert_bias_spread_mean"
TRAIN_ROUTER_Z_LOSS = "train/router_z_loss"
TRAIN_SEQUENCE_BALANCE_LOSS = "train/sequence_balance_loss"
TRAIN_UPDATE_BALANCE_LOSS = "train/update_balance_loss"
TRAIN_MISSING_ROUTES = "train/missing_route_share"
"""Share of an update's decisions, tokens times layers with experts, for which the engines or the pass of the old
log-probs gave no complete route. The live router decides there. Last tokens of samples are not counted. This and the
next only where samples have routes."""
TRAIN_DIFFERENT_ROUTES = "train/different_route_share"
"""Share of the other decisions for which the live router would choose other experts than the route has; without
`train.routing_replay` it chooses them."""
PREFERENCE_LOSS = "preference/loss"
PREFERENCE_ACCURACY = "preference/accuracy"
"""Share of the pairs whose better response has the larger implicit reward; a tie counts half. Of unpaired examples: of
those whose reward is on the right side of z0."""
PREFERENCE_MARGIN = "preference/margin"
"""Implicit reward of the better response less that of the other, of pairs."""
PREFERENCE_CHOSEN_REWARD = "preference/chosen_reward"
"""beta * (log-prob by the policy - by the reference) of the better, or desirable, responses."""
PREFERENCE_REJECTED_REWARD = "preference/rejected_reward"
PREFERENCE_CHOSEN_LOGPROB = "preference/chosen_logprob"
"""Log-prob of complete responses by the policy."""
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
"""Time for which engines could not generate because their weights changed, summed over engines."""
SYNC_PAUSE_MAX = "sync/pause_max_ms"
"""The same of the engine for which it was longest."""
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
"""Prompts, responses and time of a set of `evaluation`, as `of_set` names them."""
SET_LEFT_OUT = "left_out_samples"
"""Responses that are in none, since what scores them failed."""
SET_TRAINING = "training_prompts"
"""Prompts of the set that the model learns from too."""
SAMPLES_BYTES = "samples/written_bytes"
"""Bytes of the steps that the sample store has written since the last record. The next is their time."""
SAMPLES_TIME = "samples/write_ms"
CHECKPOINT_STALL = "checkpoint/stall_ms"
CHECKPOINT_BYTES = "checkpoint/written_bytes"
CHECKPOINT_HOST_BYTES = "checkpoint/host_bytes"
CHECKPOINT_COMPLETE_AFTER = "checkpoint/complete_after_sec"
CHECKPOINT_FAILED = "checkpoint/failed"
CHECKPOINT_BEST_STEP, CHECKPOINT_BEST_VALUE = "checkpoint/best_step", "checkpoint/best_value"
"""Step and value of the best checkpoint so far by `checkpoint.keep_best`."""


@dataclass(frozen=True)
class UpdateNames:
    """Names of the metrics of optimizer steps, of any model."""

    gradient_norm: str
    learning_rate: str
    skipped_updates: str
    padding_share: str
    optimizer_time: str
    """Time of a step's updates after the norm of the gradient is known, of the slowest rank: the optimizer's step, and
    the transfer of a state in host memory.
    """
    capacity_retries: str
    """Updates whose micro-batches were all computed again, as the rows of a layer's experts exceeded their predicted
    capacity. Only with `predicted_expert_capacity`."""
    pipeline_bubble: str
    """Time for which a rank waits for other pipeline stages in an update, over the time for which it computes, mean
    over updates: (pp - 1) / (vpp * micro-batches), with stages and micro-batches of the same cost (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2). Only with pp above 1."""
    split_share: str
    """Share of the micro-batches whose sequences were split over context-parallel ranks; in others each of these ranks
    has complete sequences. Only with cp above 1."""
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
    expert_load_entropy: str
    """Entropy of the load of a layer's experts, over all tokens of a step's updates, divided by that of an even load:
    the mean over layers. 1 where all experts are loaded alike, 0 where one has all tokens."""
    expert_load_entropy_min: str
    """The same of the layer where it is lowest."""
    dead_experts: str
    """Experts of all layers that no token of a step's updates was given."""
    expert_bias_spread: str
    """Largest less smallest expert bias of a layer in a step's last update, of the layer where that is largest. This
    and the next only where routers have an expert bias."""
    expert_bias_spread_mean: str
    """The mean over all layers."""
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
    """Names of a critic's metrics."""

    value_loss: str
    clip_fraction: str
    value_mean: str
    return_mean: str
    explained_variance: str

    @classmethod
    def of(cls, role: str) -> CriticNames:
        """Return the names of the critic with this role, in a group of that name."""
        groups = {field.name: f"{role}/{field.name}" for field in fields(cls)}
        elsewhere = {
            "gpu_memory": f"memory/{role}_gpu_mem_mb",
            "gpu_reserved": f"memory/{role}_gpu_reserved_mb",
            "host_memory": f"memory/{role}_host_mem_mb",
            "device_throughput": f"{role}/device_tokens_per_sec",
            "optimizer_time": f"{role}/optimizer_time_ms",
            "capacity_retries": f"{role}/capacity_retries",
        }
        return cls(**groups | elsewhere)


ACTOR = UpdateNames(
    gradient_norm=TRAIN_GRADIENT_NORM,
    learning_rate=TRAIN_LEARNING_RATE,
    skipped_updates=TRAIN_SKIPPED_UPDATES,
    padding_share=TRAIN_PADDING_SHARE,
    optimizer_time=TRAIN_OPTIMIZER_TIME,
    capacity_retries=TRAIN_CAPACITY_RETRIES,
    pipeline_bubble=TRAIN_PIPELINE_BUBBLE,
    split_share=TRAIN_SPLIT_SHARE,
    device_throughput=TRAIN_DEVICE_THROUGHPUT,
    mfu=TRAIN_MFU,
    gpu_memory=ACTOR_GPU_MEMORY,
    gpu_reserved=ACTOR_GPU_RESERVED,
    expert_load_max=TRAIN_EXPERT_LOAD_MAX,
    expert_load_max_layer=TRAIN_EXPERT_LOAD_MAX_LAYER,
    expert_load_max_mean=TRAIN_EXPERT_LOAD_MAX_MEAN,
    expert_load_min=TRAIN_EXPERT_LOAD_MIN,
    expert_load_entropy=TRAIN_EXPERT_LOAD_ENTROPY,
    expert_load_entropy_min=TRAIN_EXPERT_LOAD_ENTROPY_MIN,
    dead_experts=TRAIN_DEAD_EXPERTS,
    expert_bias_spread=TRAIN_EXPERT_BIAS_SPREAD,
    expert_bias_spread_mean=TRAIN_EXPERT_BIAS_SPREAD_MEAN,
    router_z_loss=TRAIN_ROUTER_Z_LOSS,
    sequence_balance_loss=TRAIN_SEQUENCE_BALANCE_LOSS,
    update_balance_loss=TRAIN_UPDATE_BALANCE_LOSS,
    host_memory="memory/actor_host_mem_mb",
)
CRITIC = CriticNames.of("critic")
COST_CRITIC = CriticNames.of("cost_critic")


def coefficient(setting: str) -> str:
    """Return the metric of an algorithm's setting that changes from step to step."""
    return f"train/{setting}"


def of_set(name: str, figure: str) -> str:
    """Metric of a held-out set; figures are those of `evaluation_statistics` and the `SET_...` above."""
    return f"eval/{figure}" if name == EVAL else f"eval/{name}/{figure}"


def set_of(metric: str) -> tuple[str, str] | None:
    """The set and the figure that `of_set` names so; None for another metric."""
    match = re.fullmatch(r"eval/(?:([^/]+)/)?([^/]+)", metric)
    return (match[1] or EVAL, match[2]) if match is not None else None


def of_source(name: str, figure: str) -> str:
    """Return the metric of samples whose prompts are of one source of `data.files.train`."""
    return f"data/{name}/{figure}"
