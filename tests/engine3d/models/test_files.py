"""HuggingFace directories in and out: bad files, random weights, value heads."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.models import (
    check_finite_weights,
    check_weights,
    initialise_random,
    load_model_spec,
    model_spec,
    weight_notes,
)
from engine3d.models.files.safetensors_files import ExportFiles, TensorFiles, plan_export
from engine3d.rollout.served import check_files
from tests.support.distributed import RankFailedError, run_distributed
from tests.support.tiny_families import CONFIGS, MOE, make

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in several files."""
    directory = tmp_path_factory.mktemp("models") / "sound"
    initialise_random(model_spec(MOE), directory, seed=1, dtype=torch.float32, max_shard_bytes=50e3)
    return directory


def test_an_export_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, fsync, rename = [], os.fsync, Path.rename

    def flushed(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def named(path: Path, target: Path) -> Path:
        events.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", named)
    spec, directory = model_spec(MOE), tmp_path / "model"
    initialise_random(spec, directory, seed=1, dtype=torch.float32, max_shard_bytes=50e3)
    index = events.index(directory)
    partial = {path for path in events[:index] if path.is_relative_to(tmp_path)}
    [root] = {path for path in partial if any(path == other.parent for other in partial)}
    assert {path.name for path in partial - {root}} == {path.name for path in directory.iterdir()}
    assert events[index + 1 :] == [tmp_path]


def file_of(directory: Path, tensor: str) -> Path:
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def change_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Rewrite the file of a tensor with another in its place, or without it."""
    file = file_of(directory, name)
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file({**tensors, name: changed} if changed is not None else tensors, file)


def truncate(directory: Path) -> None:
    file = file_of(directory, Q_PROJ)
    file.write_bytes(file.read_bytes()[:-4])


def lengthen(directory: Path) -> None:
    file = file_of(directory, Q_PROJ)
    file.write_bytes(file.read_bytes() + b"0")


def scramble(directory: Path) -> None:
    file_of(directory, Q_PROJ).write_bytes(b"\x10\0\0\0\0\0\0\0not a header....")


def change_header(directory: Path, **changes: Any) -> None:
    """Say something else of a tensor, in as many bytes."""
    file = file_of(directory, Q_PROJ)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[Q_PROJ] |= changes
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def unname(directory: Path) -> None:
    """The index does not name a tensor of a file that it names."""
    index = json.loads((directory / INDEX).read_text())
    del index["weight_map"][Q_PROJ]
    (directory / INDEX).write_text(json.dumps(index))


def forget(directory: Path) -> None:
    change_tensor(directory, Q_PROJ, lambda tensor: None)
    unname(directory)


def add_single(directory: Path) -> None:
    shutil.copyfile(file_of(directory, Q_PROJ), directory / "model.safetensors")


def join(directory: Path) -> None:
    """All tensors in a single file, and one of the former files next to it."""
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    (directory / INDEX).unlink()
    save_file(tensors, directory / "model.safetensors")


def repeat(directory: Path) -> None:
    """A tensor in two files that the index names."""
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name = next(iter(load_file(first)))
    save_file({**tensors, name: load_file(first)[name]}, second)


def lead_away(directory: Path, way: str) -> None:
    """The index names a whole file elsewhere, which holds just what is wanted."""
    index = json.loads((directory / INDEX).read_text())
    name = index["weight_map"][Q_PROJ]
    (directory / name).rename(directory.parent / name)
    elsewhere = way.format(parent=directory.parent, name=name)
    (directory / INDEX).write_text(
        json.dumps({"weight_map": {k: elsewhere if v == name else v for k, v in index["weight_map"].items()}})
    )


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tensor": (forget, rf"^tensor {Q_PROJ}: missing in .*; expected with shape \[64, 32\]$"),
    "index lies": (
        lambda at: change_tensor(at, Q_PROJ, lambda tensor: None),
        rf"^tensor {Q_PROJ}: not in .*model-0.*, though {INDEX} says so$",
    ),
    "shape": (
        lambda at: change_tensor(at, Q_PROJ, lambda tensor: tensor[:60].clone()),
        rf"^tensor {Q_PROJ} in .*model-0.*: expected shape \[64, 32\], found \[60, 32\]$",
    ),
    "dtype": (
        lambda at: change_tensor(at, Q_PROJ, lambda tensor: tensor.to(torch.float8_e5m2)),
        rf"^tensor {Q_PROJ} in .*: dtype F8_E5M2 of quantised weights, expected F64, F32, BF16, F16",
    ),
    "no file": (lambda at: file_of(at, Q_PROJ).unlink(), rf"^.*model-0.*: no such file, though {INDEX} names it$"),
    "truncated": (truncate, r"^.*model-0.*: damaged: expected \d+ bytes by its header, found \d+$"),
    "too long": (lengthen, r"^.*model-0.*: damaged: expected \d+ bytes by its header, found \d+$"),
    "scrambled": (scramble, r"^.*model-0.*: not a safetensors file: its header cannot be read"),
    "empty": (
        lambda at: file_of(at, Q_PROJ).write_bytes(b""),
        r"^.*model-0.*: not a whole safetensors file: its header does not fit its 0 bytes$",
    ),
    "offsets": (
        lambda at: change_header(at, data_offsets=[0, 4]),
        r"^.*model-0.*: damaged: safetensors cannot read it: ",
    ),
    "no such dtype": (
        lambda at: change_header(at, dtype="F31"),
        r"^.*model-0.*: damaged: safetensors cannot read it: .*F31",
    ),
    "no index": (
        lambda at: (at / INDEX).unlink(),
        rf"^model .*: has no weights; expected model.safetensors or {INDEX}; found model-0.* and \d+ more without an",
    ),
    "single file next to an index": (
        add_single,
        rf"^model .*: model.safetensors next to {INDEX}: transformers reads the former, and SGLang the files of the",
    ),
    "other files next to a single one": (
        join,
        r"^model .*: model-0.* next to model.safetensors: SGLang reads both, and transformers the latter; expected",
    ),
    "twice": (repeat, r"^tensor \S+: in \S+ and in \S+$"),
    "file above": (
        lambda at: lead_away(at, "../{name}"),
        rf"^.*{INDEX}: names '\.\./model-0.*', expected a file of its own directory$",
    ),
    "absolute file": (
        lambda at: lead_away(at, "{parent}/{name}"),
        rf"^.*{INDEX}: names '/.*model-0.*', expected a file of its own directory$",
    ),
    "index": (lambda at: (at / INDEX).write_text("[1"), rf"^.*{INDEX}: not valid JSON: "),
    "no map": (lambda at: (at / INDEX).write_text("{}"), rf"^.*{INDEX}: expected a JSON object with weight_map"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_weights_are_named_in_one_line(sound: Path, tmp_path: Path, kind: str) -> None:
    spoil, message = BAD_FILES[kind]
    directory = tmp_path / "model"
    shutil.copytree(sound, directory)
    check_weights(load_model_spec(directory), directory)
    spoil(directory)
    with pytest.raises(UserError, match=message) as caught:
        check_weights(load_model_spec(directory), directory)
    assert "\n" not in str(caught.value)


def test_whole_files_are_read_as_transformers_reads_them(sound: Path, tmp_path: Path) -> None:
    """Also tensors that the index does not name, files by links, and a publisher's own file that both leave out."""
    from transformers import AutoModelForCausalLM

    directory, store = tmp_path / "model", tmp_path / "blobs"
    shutil.copytree(sound, store)
    unname(store)
    directory.mkdir()
    for path in store.iterdir():
        (directory / path.name).symlink_to(path)
    spec = load_model_spec(directory)
    check_weights(spec, directory)
    expected = AutoModelForCausalLM.from_pretrained(directory).state_dict()[Q_PROJ]
    with TensorFiles(directory) as files:
        assert torch.equal(files.read(Q_PROJ, tuple((0, size) for size in expected.shape)), expected)

    initialise_random(spec, tmp_path / "whole", seed=1, dtype=torch.float32)
    shutil.copyfile(next(store.glob("*.safetensors")), tmp_path / "whole" / "consolidated.safetensors")
    check_weights(load_model_spec(tmp_path / "whole"), tmp_path / "whole")


def test_an_output_layer_of_its_own_in_a_tied_model(tmp_path: Path) -> None:
    """transformers does not tie what differs, and SGLang leaves it out."""
    directory = tmp_path / "model"
    spec = model_spec(CONFIGS["qwen3-tied"])
    initialise_random(spec, directory, seed=1, dtype=torch.float32)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    check_weights(spec, directory)
    assert weight_notes(spec, directory) == []
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, directory / "model.safetensors")
    with pytest.raises(
        UserError, match=r"^tensor lm_head\.weight in .*: differs from model\.embed_tokens\.weight, and"
    ):
        check_weights(spec, directory)
    check_weights(model_spec(CONFIGS["qwen3-tied"], value_head=True), directory)


def test_tensors_that_are_not_read_are_named(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(sound, directory)
    spec = load_model_spec(directory)
    assert weight_notes(spec, directory) == []
    file = file_of(directory, Q_PROJ)
    inner = "model.layers.0.self_attn"
    known = {f"{inner}.rotary_emb.inv_freq": torch.ones(4), "model.layers.4.eh_proj.weight": torch.ones(4)}
    save_file({**load_file(file), **known}, file)
    assert weight_notes(spec, directory) == []
    save_file({**load_file(file), f"{inner}.k_proj.bias": torch.ones(4), f"{inner}.q_proj.bias": torch.ones(4)}, file)
    [note] = weight_notes(spec, directory)
    assert note.endswith("_proj.bias and 1 more of the files: not part of Qwen3MoeForCausalLM, and not read")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_one_weight_that_is_no_number_is_named(sound: Path, tmp_path: Path, value: float) -> None:
    directory = tmp_path / "model"
    shutil.copytree(sound, directory)
    spec = load_model_spec(directory)
    looked_at, nbytes = check_finite_weights(spec, directory, limit_s=60)
    assert looked_at == nbytes == 4 * spec.parameter_count()
    assert check_finite_weights(spec, directory, limit_s=-1) == (0, nbytes)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[63, 5] = value
        return tensor

    change_tensor(directory, Q_PROJ, spoil)
    line = rf"^tensor {Q_PROJ} in .*model-0.*: element \[63, 5\] is nan or infinite, expected finite weights$"
    with pytest.raises(UserError, match=line):
        check_finite_weights(spec, directory, limit_s=60)


def test_directories_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model .*/absent: no such directory"):
        load_model_spec(tmp_path / "absent")
    with pytest.raises(UserError, match=r"^model .*: has no config\.json"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        load_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json: expected a JSON object, found a list"):
        load_model_spec(tmp_path)


def test_random_weights_depend_on_seed_and_name_alone(sound: Path, tmp_path: Path) -> None:
    spec = model_spec(MOE)
    initialise_random(spec, tmp_path / "whole", seed=1, dtype=torch.float32)
    initialise_random(spec, tmp_path / "other", seed=2, dtype=torch.float32)
    first, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "other"))
    assert not (tmp_path / "whole" / INDEX).exists()
    assert list(first) and set(first) == set(spec.hf_tensors)
    for file in sound.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(tensor, first[name])
    assert not torch.equal(first[Q_PROJ], other[Q_PROJ])
    assert torch.equal(first["model.norm.weight"], torch.ones(32))
    assert abs(float(first["model.embed_tokens.weight"].std()) - 0.02) < 0.001
    with pytest.raises(UserError, match="exists already"):
        initialise_random(spec, tmp_path / "whole", seed=1, dtype=torch.float32)


def test_random_weights_load_in_transformers(sound: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(sound, output_loading_info=True)
    model, report = loaded
    assert not any(report.values())
    assert torch.isfinite(model(torch.arange(9)[None]).logits).all()


@pytest.mark.parametrize("box", [((0, 6), (0, 5), (0, 4)), ((2, 4), (1, 3), (0, 4)), ((1, 5), (2, 5), (1, 3))])
def test_boxes_are_written_where_they_belong(tmp_path: Path, box: tuple[tuple[int, int], ...]) -> None:
    shapes: dict[str, tuple[int, ...]] = {"before": (3,), "cube": (6, 5, 4), "after": (2, 2)}
    files = ExportFiles(plan_export(shapes, torch.bfloat16, 1e9), tmp_path)
    files.create()
    values = torch.randn([stop - start for start, stop in box])
    files.write("cube", box, values)
    files.close()
    expected = torch.zeros(6, 5, 4, dtype=torch.bfloat16)
    expected[tuple(slice(*span) for span in box)] = values.bfloat16()
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["cube"], expected)
    assert not written["before"].any() and not written["after"].any()
    with TensorFiles(tmp_path) as opened:
        assert torch.equal(opened.read("cube", box), values.bfloat16())


def test_a_fingerprint_is_of_the_weights_and_not_of_their_files(sound: Path, tmp_path: Path) -> None:
    def fingerprint(tensors: dict[str, torch.Tensor], *files: str) -> str:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        names = sorted(tensors)
        file_of = {name: files[index % len(files)] for index, name in enumerate(names)}
        for file in files:
            save_file({name: tensors[name] for name in names if file_of[name] == file}, directory / file)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
        with TensorFiles(directory) as opened:
            return opened.fingerprint()

    tensors = {name: value for path in sound.glob("*.safetensors") for name, value in load_file(path).items()}
    with TensorFiles(sound) as files:
        expected = files.fingerprint()
    assert fingerprint(tensors, "a.safetensors") == fingerprint(tensors, "a.safetensors", "b.safetensors") == expected
    name = sorted(tensors)[-1]
    for other in (tensors[name] + 1, tensors[name].double(), tensors[name].flatten()[None]):
        assert fingerprint(tensors | {name: other}, "a.safetensors") != expected
    assert fingerprint(tensors | {"more": torch.zeros(0)}, "a.safetensors") != expected


def test_files_stay_below_the_limit(sound: Path) -> None:
    sizes = [file.stat().st_size for file in sound.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) < 50e3 + 8e3


# Ranks ---------------------------------------------------------------------------------------------------------------


def start(layout: Layout) -> Any:
    from engine3d.training.megatron import parallel

    return parallel.initialise(layout, seed=1, timeout_s=300)


def values_of_ranks(directory: Path, tokens: torch.Tensor, export: Path, layout: Layout) -> dict[str, Any]:
    """Values, gradients of the value head and final norm, and an export, of a critic."""
    from megatron.core import parallel_state

    from engine3d.models import build_model, export_weights, load_weights
    from tests.engine3d.models.test_logits import forward

    coordinates = start(layout)
    spec = load_model_spec(directory, value_head=True)
    model = build_model(spec, layout, torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    initialised = load_weights(model, spec, layout, coordinates, directory)
    values = forward(model, tokens)
    gradients = {}
    if layout.pp == 1:
        model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).square().sum().backward()
        for name in ("output_layer.weight", "decoder.final_layernorm.weight"):
            gradient = model.get_parameter(name).grad
            torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
            gradients[name] = gradient
        gradients["qkv"] = model.get_parameter("decoder.layers.0.self_attention.linear_qkv.weight").grad
    export_weights(model, spec, layout, coordinates, export, torch.float32)
    return {"values": values, "gradients": gradients, "initialised": initialised}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", Layout(tp=2)),
        ("qwen3-tied", Layout(pp=2)),
        pytest.param("llama", Layout(pp=2), marks=pytest.mark.release),
        pytest.param("qwen3-tied", Layout(tp=2), marks=pytest.mark.release),
    ],
    ids=str,
)
def test_a_value_head_equals_a_transformers_reward_model(tmp_path: Path, name: str, layout: Layout) -> None:
    from transformers import AutoModelForSequenceClassification

    reward_model = make(name, tmp_path / "model", value_head=True)
    tokens = torch.arange(24).view(2, 12)
    expected = reward_model.score(reward_model.model(tokens).last_hidden_state)
    expected.square().sum().backward()
    results = run_distributed(
        values_of_ranks, 2, tmp_path / "model", tokens, tmp_path / "export", layout, timeout_s=300
    )
    for result in results:
        assert result["initialised"] == ()
        if result["values"] is not None:
            assert result["values"].dtype == torch.float32 and result["values"].shape == (2, 12, 1)
            assert torch.allclose(result["values"], expected, atol=1e-4)
        for parameter, ours in result["gradients"].items():
            if parameter != "qkv":
                theirs = reward_model.score if parameter == "output_layer.weight" else reward_model.model.norm
                assert torch.allclose(ours, theirs.weight.grad, rtol=1e-4, atol=1e-3), parameter
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "export")
    for (parameter, ours), theirs in zip(
        exported.state_dict().items(), reward_model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), parameter


def new_value_head(directory: Path, layout: Layout) -> dict[str, Any]:
    from engine3d.models import build_model, load_weights

    coordinates = start(layout)
    spec = load_model_spec(directory, value_head=True)
    model = build_model(spec, layout, torch.bfloat16)
    initialised = load_weights(model, spec, layout, coordinates, directory)
    weight = model.get_parameter("output_layer.weight")
    return {"initialised": initialised, "weight": weight.detach().float(), "dtype": str(weight.dtype)}


def test_a_critic_of_a_language_model_starts_with_a_new_head(sound: Path) -> None:
    (result,) = run_distributed(new_value_head, 1, sound, Layout(), timeout_s=300)
    assert result["initialised"] == ("score.weight",)
    assert result["dtype"] == "torch.bfloat16" and not result["weight"].any()


def failing_export(directory: Path, export: Path, layout: Layout) -> list[str]:
    """Messages of each rank when one of them cannot write, and when the target exists."""
    import engine3d.models.files.weights as weights
    from engine3d.models import build_model, load_weights

    coordinates = start(layout)
    spec = load_model_spec(directory)
    model: Any = build_model(spec, layout, torch.float32)
    load_weights(model, spec, layout, coordinates, directory)
    said = []

    def attempt() -> None:
        try:
            weights.export_weights(model, spec, layout, coordinates, export, torch.float32)
        except (UserError, EngineError) as error:
            said.append(str(error))

    if coordinates.tp == 1:
        # This rank's parameters no longer fit their rules.
        name, parameter = "weight", model.decoder.final_layernorm.weight
        setattr(model.decoder.final_layernorm, name, torch.nn.Parameter(parameter[:5].detach()))
    attempt()
    assert not export.exists()
    torch.distributed.barrier()
    export.mkdir(exist_ok=True)
    attempt()
    return said


def test_an_export_that_fails_on_one_rank_fails_on_all(sound: Path, tmp_path: Path) -> None:
    first, second = run_distributed(failing_export, 2, sound, tmp_path / "export", Layout(tp=2), timeout_s=300)
    assert first[0] == f"export: rank 1 failed: {second[0]}"
    assert second[0] == ("parameter decoder.final_layernorm.weight: the rules say shape [32], the model has [5]")
    assert all("exists already; expected a new directory" in said[1] for said in (first, second))


def refusals_on_ranks(directories: list[Path]) -> list[str]:
    from engine3d.models import build_model, load_weights

    layout = Layout(tp=2)
    coordinates = start(layout)
    said = []
    for directory in directories:
        spec = load_model_spec(directory)
        model = build_model(spec, layout, torch.float32)
        with pytest.raises(UserError) as caught:
            load_weights(model, spec, layout, coordinates, directory)
        said.append(str(caught.value))
    return said


def test_ranks_refuse_bad_weights_too(sound: Path, tmp_path: Path) -> None:
    lacking, spoiled = (Path(shutil.copytree(sound, tmp_path / name)) for name in ("lacking", "spoiled"))
    forget(lacking)
    change_tensor(spoiled, Q_PROJ, lambda tensor: tensor.fill_(torch.nan))
    for missing, no_number in run_distributed(refusals_on_ranks, 2, [lacking, spoiled], timeout_s=300):
        assert missing.startswith(f"tensor {Q_PROJ}: missing in ")
        assert no_number.startswith(f"tensor {Q_PROJ} in ")
        assert no_number.endswith(": a weight is nan or infinite as float32, expected finite weights")


def hang_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        import time

        time.sleep(600)


def die_on_rank_one() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)


@pytest.mark.processes
def test_the_helper_ends_ranks_that_hang_or_die() -> None:
    # On a busy machine the other rank may not be done either.
    with pytest.raises(RankFailedError, match=r"ranks \[(0, )?1\] were not done after 3 s"):
        run_distributed(hang_on_rank_one, 2, timeout_s=3)
    with pytest.raises(RankFailedError, match="rank 1 died"):
        run_distributed(die_on_rank_one, 2, timeout_s=300)


def test_configs_without_value_head_name(tmp_path: Path) -> None:
    classifier = {**CONFIGS["llama"], "architectures": ["LlamaForSequenceClassification"]}
    assert model_spec(classifier, value_head=True).value_head
    with pytest.raises(UserError, match="LlamaForSequenceClassification is not supported"):
        model_spec(classifier)


@pytest.mark.slow
@pytest.mark.parametrize(("embedding_std", "least", "most"), [(None, 0, 24), (10.0, 31, 32)])
def test_wide_embeddings_keep_tokens_apart_in_deep_models(
    embedding_std: float | None, least: int, most: int, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 32, "num_experts_per_tok": 4}
    sizes = sparse | {"hidden_size": 64, "num_hidden_layers": 16, "vocab_size": 256}
    # As far from the mean as one of a wide model: the deviation goes with the root of the width.
    config = dict(MOE) | sizes | {"initializer_range": 0.02 * (2048 / 64) ** 0.5}
    initialise_random(model_spec(config), tmp_path / "m", seed=1, dtype=torch.float32, embedding_std=embedding_std)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    used: list[int] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda gate, given, _: used.append(len((given[0].reshape(-1, 64) @ gate.weight.T).topk(4).indices.unique()))
        )
    with torch.no_grad():
        model(torch.arange(256)[None])
    assert least <= sum(used[8:]) / 8 <= most


def test_embeddings_may_be_wider_than_all_else(tmp_path: Path) -> None:
    initialise_random(model_spec(MOE), tmp_path / "even", seed=1, dtype=torch.float32, embedding_std=10.0)
    initialise_random(model_spec(MOE), tmp_path / "as-ever", seed=1, dtype=torch.float32)
    even, ever = (load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("even", "as-ever"))
    table = "model.embed_tokens.weight"
    assert even[table].std() == pytest.approx(10, rel=0.1)
    assert all(torch.equal(even[name], ever[name]) for name in ever.keys() - {table})
    tied = model_spec(dict(MOE) | {"tie_word_embeddings": True})
    with pytest.raises(UserError, match="embedding_std: the table is the output layer too"):
        initialise_random(tied, tmp_path / "tied", seed=1, dtype=torch.float32, embedding_std=10.0)
    assert not (tmp_path / "tied").exists()


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt-oss whose experts are in MXFP4, in files as they are published."""
    directory = tmp_path_factory.mktemp("models") / "mxfp4"
    config = {**CONFIGS["gpt_oss"], "intermediate_size": 64, "num_hidden_layers": 1}
    initialise_random(model_spec(config), directory, seed=1, dtype=torch.bfloat16)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        experts, columns, rows = tensors.pop(f"{MXFP4_EXPERTS}{name}").shape
        shape = (experts, rows, columns // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(100, 150, shape, dtype=torch.uint8, generator=generator)
        tensors |= {f"{MXFP4_EXPERTS}{name}_blocks": blocks, f"{MXFP4_EXPERTS}{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    return directory


MXFP4_EXPERTS = "model.layers.0.mlp.experts."


def test_experts_in_mxfp4_are_dequantised_exactly(mxfp4: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    spec, stored = load_model_spec(mxfp4), load_file(mxfp4 / "model.safetensors")
    check_weights(spec, mxfp4)
    assert weight_notes(spec, mxfp4) == ["2 tensors of the files are in MXFP4: they are dequantised when they are read"]
    with TensorFiles(mxfp4) as files:
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = (stored[f"{MXFP4_EXPERTS}{name}_{kind}"] for kind in ("blocks", "scales"))
            expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            box = tuple((0, size) for size in spec.hf_shape(MXFP4_EXPERTS + name))
            given = files.read(MXFP4_EXPERTS + name, box)
            assert torch.equal(given.bfloat16(), expected) and torch.equal(given.bfloat16().float(), given)
            assert torch.equal(files.read(MXFP4_EXPERTS + name, ((3, 5), (7, 32), (1, 4))), given[3:5, 7:32, 1:4])
        assert files.fingerprint()
    with pytest.raises(UserError, match=r"mxfp4: model\.layers\.0\.mlp\.experts\.down_proj is in MXFP4, which engines"):
        check_files(mxfp4, None)


def test_mxfp4_that_the_config_does_not_name_is_refused(mxfp4: Path, tmp_path: Path) -> None:
    shutil.copytree(mxfp4, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": None}))
    spec = load_model_spec(tmp_path / "model")
    with pytest.raises(
        UserError, match='down_proj; expected quantization_config with quant_method "mxfp4", found nothing'
    ):
        check_weights(spec, tmp_path / "model")
