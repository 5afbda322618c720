"""Wrong settings or models of an engine are refused before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from engine3d.errors import UserError
from engine3d.models import load_model_spec, model_spec
from engine3d.platform.cuda.cuda_platform import CudaPlatform, expert_kernels, graph_batch_sizes
from engine3d.rollout import RolloutConfig, RolloutEngine, SamplingConfig, launch, moe_configs, server_arguments
from engine3d.rollout.host.generation import submission_order
from engine3d.rollout.host.log import root_cause, temporary_log
from engine3d.rollout.served import check_device, check_served
from engine3d.run_files import make_run_directory, segment_name
from engine3d.sglang_source import sglang_directory
from tests.support import tiny_families


def test_every_accepted_argument_is_one_of_sglangs() -> None:
    assert server_arguments.ACCEPTED.keys() <= server_arguments.server_argument_names()
    assert server_arguments._OWNED.keys() <= server_arguments.server_argument_names()
    assert not server_arguments.ACCEPTED.keys() & server_arguments._OWNED.keys()


def test_seeds_and_fused_sampling_are_refused_together() -> None:
    with pytest.raises(ValidationError, match="fused_sampling=true draws without the seeds that deterministic=true"):
        RolloutConfig(fused_sampling=True, deterministic=True)


def test_accepted_arguments_go_to_sglang_as_they_are() -> None:
    given = {
        "load_format": "dummy",
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 4096,
        "cuda_graph_max_bs_decode": 8,
        "enable_torch_compile": True,
        "schedule_conservativeness": 0.3,
    }
    assert RolloutConfig(server_args=given).server_args == given


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("chunked_prefil_size", 512, "is not an argument of SGLang's ServerArgs; did you mean chunked_prefill_size"),
        ("chunked_prefill_size", "512", "= '512': expected a whole number of at least 1, or -1"),
        ("load_format", "sharded_state", "= 'sharded_state': expected auto or safetensors or dummy"),
        ("moe_runner_backend", "flashinfer_trtllm", "= 'flashinfer_trtllm': expected triton "),
        ("tp_size", 2, "is not set here; set tp"),
        ("decode_attention_backend", "fa3", "is not set here; set attention_backend"),
        ("enable_eplb", True, "is refused: experts move in memory"),
        ("ep_num_redundant_experts", 4, "is refused: experts move in memory"),
        ("speculative_algorithm", "EAGLE", "is refused: draft_tokens drafts with the model's own layer"),
        ("pp_size", 2, "is refused: the model is cut over ranks otherwise"),
        ("enable_dp_attention", True, "is not set here; set attention_dp"),
        ("enable_dp_attention_local_control_broadcast", True, "is refused: the model is cut over ranks otherwise"),
        ("moe_a2a_backend", "deepep", "is refused: the model is cut over ranks otherwise"),
        ("nnodes", 2, "is refused: placement.rollout says on which hosts an engine is"),
        ("quantization", "fp8", "is refused: the engine computes in another precision"),
        ("torchao_config", "int4wo-128", "is refused: the engine computes in another precision"),
        ("kv_cache_dtype", "fp8_e5m2", "is not set here; set kv_cache_dtype"),
        ("disaggregation_mode", "prefill", "is refused: a second engine reads the prompts"),
        ("cpu_offload_gb", 4, "is refused: weights lie in host memory"),
        ("enable_weights_cpu_backup", True, "is refused: weights lie in host memory"),
        ("enable_hierarchical_cache", True, "is refused: keys and values of old weights outlive them"),
        (
            "enable_lora",
            True,
            "is refused: engines get the adapters of train.lora, merged or as",
        ),
        ("json_model_override_args", "{}", "is refused: the engine serves another model"),
        ("preferred_sampling_params", "{}", r"is refused: rollout\.sampling says how tokens are drawn"),
        ("api_key", "secret", "is refused: there is no HTTP server"),
        ("device", "cuda", r"is refused: placement\.rollout says which devices"),
        (
            "enable_mixed_chunk",
            True,
            "is refused: it was not tried, .*; accepted are load_format, chunked_prefill_size",
        ),
    ],
)
def test_other_arguments_of_sglang_are_refused_with_the_reason(name: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=rf"server_args\.{name} {message}") as refused:
        RolloutConfig(server_args={name: value})
    assert "secret" not in refused.value.errors()[0]["msg"]


def test_an_attention_backend_is_one_that_was_tried() -> None:
    assert RolloutConfig(attention_backend="fa3").attention_backend == "fa3"
    with pytest.raises(ValidationError, match=r"'nonsense' was not tried, expected fa3, flashinfer"):
        RolloutConfig(attention_backend="nonsense")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "fa3"}, "attention_backend=fa3: on this device SGLang runs with torch_native alone"),
        ({"server_args": {"moe_runner_backend": "triton"}}, "server_args.moe_runner_backend=triton: on this device"),
    ],
)
def test_what_a_cpu_cannot_run_is_refused_before_an_engine_starts(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = launch.ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096)
    with pytest.raises(UserError, match=message):
        launch.server_arguments(RolloutConfig(**settings), model)
    launch.server_arguments(RolloutConfig(attention_backend="torch_native"), model)


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [
        ([(9, 0)] * 4, {}),
        ([(8, 0)], {}),
        ([(10, 0)] * 8, {"moe_runner_backend": "triton"}),
        ([(10, 3)], {"moe_runner_backend": "triton"}),
        ([(12, 0)], {"moe_runner_backend": "triton"}),
        ([(9, 0), (10, 0)], {"moe_runner_backend": "triton"}),
        ([], {}),
    ],
)
def test_experts_have_a_kernel_that_leaves_their_weights_as_they_are(
    capabilities: list[tuple[int, int]], chosen: dict[str, str]
) -> None:
    assert expert_kernels(capabilities) == chosen


@pytest.mark.parametrize(
    "settings", [{"tp": 3, "ep": 2}, {"tp": 0}, {"dtype": "float8"}, {"start_timeout_s": 0}, {"unknown": 1}]
)
def test_wrong_rollout_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": 1e-8},
        {"top_p": 0},
        {"top_k": 0},
        {"top_k": 1, "temperature": 0.7},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"repetition_penalty": 1.1, "presence_penalty": 0.1},
        {"max_new_tokens": 0},
        {"stop_token_ids": [-1]},
        {"stop": [""]},
        {"stop": "text"},
    ],
)
def test_wrong_sampling_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplingConfig(**settings)


def test_a_model_directory_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        RolloutEngine(tmp_path, RolloutConfig())
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    with pytest.raises(UserError, match="not a model's configuration: KeyError 'vocab_size'"):
        RolloutEngine(tmp_path, RolloutConfig())
    config = {"architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8, "max_position_embeddings": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"holds no \*\.safetensors"):
        RolloutEngine(tmp_path, RolloutConfig())
    dummy = {"load_format": "dummy"}
    with pytest.raises(UserError, match=r"context_length is 17; .* has 16 positions"):
        RolloutEngine(tmp_path, RolloutConfig(context_length=17, server_args=dummy))
    with pytest.raises(UserError, match="3 devices for a rollout engine of tp 2"):
        RolloutEngine(tmp_path, RolloutConfig(tp=2, server_args=dummy), devices=(0, 1, 2))
    save_file({"weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged: expected \d+ bytes by its header, found \d+$"):
        RolloutEngine(tmp_path, RolloutConfig())


def test_the_root_cause_is_the_first_exception_that_is_not_a_consequence(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text(
        "UserWarning: nothing\n[12:00:00] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1\nEOFError\nValueError: heads 3 do not divide by 2\n'
        "RuntimeError: Initialization failed. Please see the error messages above.\n"
    )
    assert root_cause(log) == "ValueError: heads 3 do not divide by 2"
    log.write_text(
        "  engine3d.errors.EngineError: told to the client long ago\n"
        "RuntimeError: [/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:44192: Connection reset by peer\n"
        "Subprocess scheduler_1 (pid=5) crashed with exit code -9\n"
    )
    assert root_cause(log) == "Subprocess scheduler_1 (pid=5) crashed with exit code -9"
    saver = "[torch_memory_saver.cpp]"
    log.write_text(
        f"{saver} cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will retry)\n"
        f"{saver} cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=243\n"
        "Subprocess scheduler_DP1_TP1_EP1 (pid=5) crashed\n"
    )
    assert root_cause(log).startswith("GPU out of memory: others use memory that the engine released")
    log.write_text("Subprocess scheduler_DP1_TP1_EP1 (pid=5) crashed\nall is well\n")
    assert root_cause(log) == "Subprocess scheduler_DP1_TP1_EP1 (pid=5) crashed"
    log.write_text("all is well\n")
    assert root_cause(log) == ""


def test_the_next_run_removes_files_of_one_whose_owner_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    alive, alive_lock = make_run_directory()
    gone, gone_lock = make_run_directory()
    segment = Path("/dev/shm") / segment_name("test", gone)
    segment.touch()
    gone_lock.close()
    newest, newest_lock = make_run_directory()
    assert not gone.exists() and not segment.exists()
    assert sorted(tmp_path.iterdir()) == sorted([alive, newest])
    alive_lock.close()
    newest_lock.close()


def test_an_engines_devices_are_counted_among_those_that_its_client_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7, 0,1")
    assert CudaPlatform().visible_devices((0, 2)) == {"CUDA_VISIBLE_DEVICES": "6,0"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert CudaPlatform().visible_devices((1, 2)) == {"CUDA_VISIBLE_DEVICES": "1,2"}


def test_every_batch_runs_in_a_graph_that_is_little_larger() -> None:
    for most in (*range(1, 700), 1000, 1025, 4096):
        sizes = graph_batch_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
        for smaller, size in itertools.pairwise([7, *(size for size in sizes if size > 7)]):
            assert size < (1.25 if smaller + 1 >= 256 else 1.5) * (smaller + 1), (most, smaller, size)


def test_graphs_reach_as_far_as_requests_unless_they_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "platform", CudaPlatform())
    model = launch.ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096)
    arguments = launch.server_arguments(RolloutConfig(max_running_requests=640), model)
    assert arguments["cuda_graph_bs_decode"] == graph_batch_sizes(641)
    assert arguments["max_running_requests"] == 641  # see SPARE_REQUESTS
    given = launch.server_arguments(RolloutConfig(server_args={"cuda_graph_max_bs_decode": 256}), model)
    assert given["cuda_graph_max_bs_decode"] == 256 and "cuda_graph_bs_decode" not in given
    assert given["max_running_requests"] == 256  # a batch of one more would have no graph
    assert given["disable_prefill_cuda_graph"]


class _OneGpu(CudaPlatform):
    gpus = 1


@pytest.mark.parametrize(
    ("settings", "compiles"),
    [
        ({}, False),
        ({"deterministic": True}, True),
        ({"attention_backend": "flex_attention"}, True),
        ({"server_args": {"enable_torch_compile": True}}, True),
        ({"server_args": {"chunked_prefill_size": 512}}, False),
    ],
)
def test_an_engine_compiles_where_it_has_to(
    settings: dict[str, Any], compiles: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.setattr(launch, "platform", _OneGpu())
    model = launch.ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096)
    environment = launch.environment(RolloutConfig(**settings), model, (0,))
    assert environment.get("TORCH_COMPILE_DISABLE") == (None if compiles else "1")


def test_variables_by_which_sglang_gives_other_results_do_not_reach_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CUTLASS_MOE", "RANK"):
        monkeypatch.setenv(name, "1")
    model = launch.ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096)
    environment = launch.environment(RolloutConfig(), model, ())
    assert not {"SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CUTLASS_MOE", "RANK"} & environment.keys()


def test_settings_that_change_the_drawn_distribution_are_named() -> None:
    assert SamplingConfig(temperature=0.7, max_new_tokens=3, stop=("</a>",), stop_token_ids=(3,)).altered == {}
    cut = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
    for given in (cut | {"repetition_penalty": 1.1}, cut | {"presence_penalty": 0.2, "frequency_penalty": -0.3}):
        assert SamplingConfig(**given).altered == given


def test_an_engine_that_is_told_nothing_has_room_for_all_its_requests(tmp_path: Path) -> None:
    model = launch.ModelDirectory(tmp_path, ("Qwen3ForCausalLM",), 100, 4096)
    arguments = launch.server_arguments(RolloutConfig(max_running_requests=3, context_length=50), model)
    assert arguments["max_total_tokens"] == 4 * 51 + 1 + 8
    assert launch.server_arguments(RolloutConfig(max_total_tokens=77), model)["max_total_tokens"] == 77
    drafts = RolloutConfig(max_running_requests=3, context_length=50, draft_tokens=8)
    arguments = launch.server_arguments(drafts, model)
    assert (arguments["context_length"], arguments["max_total_tokens"]) == (50 + 9, 4 * (51 + 18) + 1 + 9)


@pytest.mark.parametrize(("prompts", "samples", "running"), [(5, 4, 8), (3, 1, 100), (4, 8, 4), (7, 3, 1000)])
def test_first_samples_of_prompts_that_run_together_come_first(prompts: int, samples: int, running: int) -> None:
    order = submission_order([samples] * prompts, running)
    assert sorted(order) == list(range(prompts * samples))
    together = max(1, running // samples)
    for start in range(0, prompts * samples, together * samples):
        block = order[start : start + together * samples]
        first = block[: len(block) // samples]
        assert all(index % samples == 0 for index in first)
        assert {index // samples for index in block} == {index // samples for index in first}
        # The others of a prompt are next to each other.
        assert block[len(first) :] == sorted(block[len(first) :])


def _model_with_experts(directory: Path, experts: int | None) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"num_experts": experts} if experts else {}))
    return directory


def test_a_part_of_the_experts_finds_what_was_tuned_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(moe_configs.VARIABLE, raising=False)
    arguments = {"model_path": str(_model_with_experts(tmp_path / "model", 128)), "ep_size": 4}
    assert moe_configs.environment(tmp_path / "moe", arguments) == {moe_configs.VARIABLE: str(tmp_path / "moe")}
    tuned = sglang_directory() / "srt/layers/moe/moe_runner/triton_utils/configs"
    name = "triton_3_6_0/E={},N=768,device_name=NVIDIA_H200.json"
    linked = tmp_path / "moe" / "configs" / name.format(32)
    assert linked.resolve() == tuned / name.format(128) and not (tuned / name.format(32)).exists()
    for path in tuned.glob("triton_*/*.json"):
        assert (tmp_path / "moe/configs" / path.relative_to(tuned)).read_bytes() == path.read_bytes()


def test_what_was_tuned_for_a_part_of_the_experts_is_kept(tmp_path: Path) -> None:
    for name in ("old/E=8,N=4.json", "new/E=8,N=4.json", "new/E=8,N=5.json", "old/E=2,N=4.json"):
        (tmp_path / "tuned" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tuned" / name).write_text(name)
    moe_configs.link(tmp_path / "tuned", tmp_path / "linked", 8, 2)
    texts = {
        str(path.relative_to(tmp_path / "linked")): path.read_text() for path in (tmp_path / "linked").rglob("E=2*")
    }
    assert texts == {"old/E=2,N=4.json": "old/E=2,N=4.json", "new/E=2,N=5.json": "new/E=8,N=5.json"}


@pytest.mark.parametrize(("experts", "ranks"), [(128, 1), (None, 4), (6, 4)])
def test_other_engines_go_by_what_sglang_has(
    experts: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(moe_configs.VARIABLE, raising=False)
    model = _model_with_experts(tmp_path / "model", experts)
    assert moe_configs.environment(tmp_path / "moe", {"model_path": str(model), "ep_size": ranks}) == {}
    monkeypatch.setenv(moe_configs.VARIABLE, "/tuned/by/the/user")
    model = _model_with_experts(tmp_path / "other", 128)
    assert moe_configs.environment(tmp_path / "moe", {"model_path": str(model), "ep_size": 4}) == {}
    assert not (tmp_path / "moe").exists()


def test_routes_are_refused_where_they_were_not_tried() -> None:
    for name, value, error in (
        ("chunked_prefill_size", -1, "chunked_prefill_size=-1 with routes=true: there is memory for the routes of as"),
        ("enable_torch_compile", True, "enable_torch_compile=true was not tried with routes=true"),
    ):
        RolloutConfig(server_args={name: value})
        with pytest.raises(ValidationError, match=error):
            RolloutConfig(server_args={name: value}, routes=True)
    with pytest.raises(ValidationError, match=r"enable_return_routed_experts is not set here; set routes"):
        RolloutConfig(server_args={"enable_return_routed_experts": True})
    check_served(model_spec(tiny_families.CONFIGS["deepseek_v3"]), RolloutConfig(routes=True))
    with pytest.raises(UserError, match="routes=true: expected false, because LlamaForCausalLM has no experts"):
        check_served(model_spec(tiny_families.CONFIGS["llama-linear"]), RolloutConfig(routes=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "float32"}, "precision=fp8 with dtype=float32, expected bfloat16"),
        ({"dtype": "float16"}, "precision=fp8 with dtype=float16, expected bfloat16"),
        ({"precision": "mxfp8"}, "'mxfp8' has a scale for 32 values of a row, and was not tried"),
        ({"tp": 4, "attention_dp": 2}, "precision=fp8 was not tried with attention_dp=2, expected one of them"),
        ({"memory_saver": True, "release_weights": True}, "precision=fp8 was not tried with release_weights=true"),
        (
            {"server_args": {"moe_runner_backend": "triton"}},
            r"not tried with server_args\.moe_runner_backend",
        ),
        ({"server_args": {"load_format": "auto"}}, r"precision=fp8 with server_args\.load_format=auto: the actor"),
        ({"precision": "fp4"}, "Input should be 'fp8'"),
    ],
)
def test_quantised_weights_are_refused_where_they_were_not_tried(settings: dict[str, Any], message: str) -> None:
    assert RolloutConfig(precision="fp8", server_args={"chunked_prefill_size": 64}).loads_weights
    assert not RolloutConfig(precision="fp8", server_args={"load_format": "dummy"}).loads_weights
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(**{"precision": "fp8", **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 4, "attention_dp": 2}, "kv_cache_dtype=fp8_e4m3 was not tried with attention_dp=2, expected one of"),
        ({"memory_saver": True}, "kv_cache_dtype=fp8_e4m3 was not tried with memory_saver=true"),
        ({"kv_cache_dtype": "fp4"}, "Input should be 'fp8_e4m3' or 'fp8_e5m2'"),
    ],
)
def test_a_kv_cache_in_fp8_is_refused_where_it_was_not_tried(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(**{"kv_cache_dtype": "fp8_e4m3", **settings})


def test_repeatable_samples_of_engines_in_fp8_are_refused_on_gpus() -> None:
    config = RolloutConfig(precision="fp8", deterministic=True)
    check_device(config, on_gpu=False)
    check_device(RolloutConfig(precision="fp8"), on_gpu=True)
    with pytest.raises(UserError, match="precision=fp8 was not tried with deterministic=true on GPUs; expected one of"):
        check_device(config, on_gpu=True)


def test_a_kv_cache_in_fp8_is_refused_of_latents_and_on_gpus() -> None:
    config = RolloutConfig(kv_cache_dtype="fp8_e4m3")
    check_device(config, on_gpu=False)
    with pytest.raises(UserError, match="kv_cache_dtype=fp8_e4m3 was not tried on GPUs; expected null"):
        check_device(config, on_gpu=True)
    with pytest.raises(UserError, match=r"kv_cache_dtype=fp8_e4m3: expected null, because Deepseek.* latent attention"):
        check_served(model_spec(tiny_families.CONFIGS["deepseek_v3"]), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deterministic": True}, "draft_tokens=1 is refused with deterministic=true: a token is drawn by its seed, "),
        ({"fused_sampling": True}, "draft_tokens=1 is refused with fused_sampling=true: its kernel draws one token"),
        ({"routes": True}, "draft_tokens=1 is refused with routes=true: SGLang counts no routes of accepted drafts"),
        ({"memory_saver": True, "release_weights": True}, "draft_tokens=1 is refused with release_weights=true"),
        ({"tp": 4, "attention_dp": 2}, "draft_tokens=1 was not tried with attention_dp=2; expected one of them"),
        ({"precision": "fp8"}, "draft_tokens=1 was not tried with precision=fp8"),
        ({"server_args": {"enable_torch_compile": True}}, r"draft_tokens=1 was not tried with server_args\.enable_tor"),
        ({"draft_tokens": 9}, "Input should be less than or equal to 8"),
    ],
)
def test_drafts_are_refused_where_they_were_not_tried(settings: dict[str, Any], message: str) -> None:
    assert RolloutConfig(draft_tokens=1, memory_saver=True, server_args={"log_level": "debug"}).draft_tokens == 1
    with pytest.raises(ValidationError, match=message):
        RolloutConfig(**{"draft_tokens": 1, **settings})


def test_drafts_need_one_complete_layer_of_a_family_that_was_tried(tmp_path: Path) -> None:
    config, directory = RolloutConfig(draft_tokens=1, dtype="float32"), tmp_path / "model"
    check_device(config, on_gpu=False)
    with pytest.raises(UserError, match="draft_tokens=1 was not tried on GPUs; expected 0"):
        check_device(config, on_gpu=True)
    none = tiny_families.CONFIGS["glm4_moe"] | {"num_nextn_predict_layers": 0}
    with pytest.raises(UserError, match="draft_tokens=1: model: num_nextn_predict_layers=0, expected 1"):
        check_served(model_spec(none), config)
    tiny_families.make("glm4_moe", directory)
    tiny_families.add_drafting_layer(directory)
    check_served(load_model_spec(directory), config)
    with pytest.raises(UserError, match=r"draft_tokens=1: model\.create makes no layer for multi-token prediction"):
        check_served(dataclasses.replace(load_model_spec(directory), directory=None), config)
    layer = load_file(directory / "multi_token.safetensors")
    missing = "model.layers.4.mlp.experts.7.down_proj.weight"
    for changed, error in (
        ({name: values for name, values in layer.items() if name != missing}, f"has no tensor {missing}, with which"),
        (layer | {missing: torch.zeros(2, 2)}, r"down_proj\.weight in .* expected shape \[32, 24\], found \[2, 2\]"),
        (
            layer | {missing: layer[missing].to(torch.float8_e4m3fn)},
            rf"has {missing} in fp8, and the layer that drafts",
        ),
    ):
        save_file(changed, directory / "multi_token.safetensors", metadata={"format": "pt"})
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        index["weight_map"].pop(missing, None)
        index["weight_map"] |= dict.fromkeys(changed, "multi_token.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UserError, match=error):
            check_served(load_model_spec(directory), config)
    tiny_families.make("qwen3_next", tmp_path / "other")
    with pytest.raises(UserError, match="draft_tokens=1 was not tried with Qwen3NextForCausalLM; expected 0"):
        check_served(load_model_spec(tmp_path / "other"), config)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"intermediate_size": 192}, {}, "tp=1 ep=1: a rank has 192 rows of gate and up of a dense MLP"),
        ({"head_dim": 64, "num_key_value_heads": 1}, {}, "tp=1 ep=1: a rank has 64 rows of keys, expected a multiple"),
        ({"head_dim": 64}, {"tp": 2}, "tp=2 ep=1: a rank has 64 rows of keys, expected a multiple of 128"),
    ],
)
def test_engines_whose_ranks_would_have_a_part_of_a_block_are_refused(
    changes: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    given = tiny_families.FP8_CONFIGS["qwen3"]
    check_served(model_spec(given), RolloutConfig(precision="fp8", tp=2))
    with pytest.raises(UserError, match=rf"^rollout\.engine\.precision=fp8 with {message}"):
        check_served(model_spec(given | changes), RolloutConfig(**{"precision": "fp8", **sizes}))


def test_experts_and_latent_attention_have_complete_blocks_on_every_rank() -> None:
    experts = tiny_families.FP8_CONFIGS["qwen3_moe"] | {"mlp_only_layers": []}
    check_served(model_spec(experts), RolloutConfig(precision="fp8", tp=2, ep=2))
    with pytest.raises(UserError, match="a rank has 64 rows of gate and up of an expert"):
        check_served(model_spec(experts | {"moe_intermediate_size": 128}), RolloutConfig(precision="fp8", tp=2))
    latent = tiny_families.FP8_CONFIGS["deepseek_v3"]
    check_served(model_spec(latent), RolloutConfig(precision="fp8", tp=2))
    with pytest.raises(UserError, match=r"a rank has 192 rows of q_a_proj \(q_lora_rank\), expected a multiple of 128"):
        check_served(model_spec(latent | {"q_lora_rank": 192}), RolloutConfig(precision="fp8"))
    with pytest.raises(UserError, match="SGLang loads no scales of blocks into LlamaForCausalLM; expected null"):
        check_served(model_spec(tiny_families.CONFIGS["llama"]), RolloutConfig(precision="fp8"))


def test_a_temporary_log_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    log = temporary_log("rollout")
    assert log.parent == tmp_path and log.read_bytes() == b""
    opened = [file.readlink() for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert log not in opened
