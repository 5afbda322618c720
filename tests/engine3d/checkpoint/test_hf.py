"""HuggingFace directories out of checkpoints and into them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from engine3d.checkpoint.hf import Exported, copy_model_files, export_checkpoint, import_checkpoint
from engine3d.checkpoint.manifest import FileEntry, Manifest, RoleSummary, file_entry, read_manifest, write_manifest
from engine3d.errors import EngineError, UserError
from engine3d.layout import Layout
from engine3d.models import initialise_random, load_model_spec, model_spec
from engine3d.models.files.safetensors_files import TensorFiles
from engine3d.models.precision import NOTHING_LEFT_OUT, Fp8Settings, dequantise, quantise, scale_box, scale_name
from tests.support.distributed import run_distributed
from tests.support.tiny_families import CONFIGS, DEEPSEEK, family_of, make

INDEX = "model.safetensors.index.json"
CASES = {
    "deepseek_v3": (Layout(tp=2), "bfloat16", False),
    "qwen3_moe": (Layout(ep=2, dp=2), "float32", False),
    "qwen3-tied": (Layout(pp=2), "bfloat16", False),
    "llama-biases": (Layout(dp=2), "bfloat16", True),
}
"""Layout, dtype of training, and presence of a value head, by model."""
LEFT_OUT = {
    "qwen3_moe": Fp8Settings(num_layers_at_start_in_bf16=1),
    "qwen3-tied": Fp8Settings(num_layers_at_end_in_bf16=2),
}
"""Matrices that stay as they are in fp8."""


# What a run saved -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, checkpoint after an update, and the engine's own export of each case."""
    root = tmp_path_factory.mktemp("runs")
    for name, (_, _, value_head) in CASES.items():
        make(name, root / name / "model", value_head=value_head)
        (root / name / "model" / "tokenizer.json").write_text(f'{{"of": "{name}"}}')
        (root / name / "checkpoint" / "critic").mkdir(parents=True)
    for name, (role, entries) in _saved(run_distributed(_train_and_save, 2, root, timeout_s=300)).items():
        checkpoint = root / name / "checkpoint"
        # That with a value head is a critic whose model is not the actor's.
        copies = copy_model_files(root / (name if name != "llama-biases" else "qwen3-tied") / "model", checkpoint)
        assert {"model/config.json", "model/tokenizer.json"} <= {copy.path for copy in copies}
        if name == "llama-biases":
            copied = copy_model_files(root / name / "model", checkpoint, "critic")
            assert {"critic-model/config.json", "critic-model/tokenizer.json"} <= {copy.path for copy in copied}
            copies += copied
        train = {"train": {"precision": "fp8", "fp8": LEFT_OUT[name].model_dump()}} if name in LEFT_OUT else {}
        recipe = {"train": {"fp8": {}}, "critic": train} if name == "qwen3_moe" else train
        write_manifest(checkpoint, Manifest(3, "now", {"critic": role}, recipe, {}, (*entries, *copies)))
    return root


def test_a_checkpoint_is_of_a_model_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"gone has no config.json any more"):
        copy_model_files(tmp_path / "gone", tmp_path)


def _saved(
    ranks: list[dict[str, tuple[RoleSummary, list[FileEntry]]]],
) -> dict[str, tuple[RoleSummary, list[FileEntry]]]:
    return {name: (role, [entry for rank in ranks for entry in rank[name][1]]) for name, (role, _) in ranks[0].items()}


def _train_and_save(root: Path) -> dict[str, tuple[RoleSummary, list[FileEntry]]]:
    from engine3d.checkpoint.writing.save import EngineCheckpoint
    from engine3d.training.config import OptimizerConfig, TrainConfig
    from engine3d.training.engine import TrainEngine
    from engine3d.training.passes.sequences import Sequences

    def loss(outputs: Any, columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, None]:
        return (outputs.logprobs if outputs.values is None else outputs.values).sum(), None

    saved = {}
    for name, (layout, dtype, value_head) in CASES.items():
        fp8 = LEFT_OUT.get(name, NOTHING_LEFT_OUT)
        config = TrainConfig(dtype=dtype, optimizer=OptimizerConfig(lr=1e-2), fp8=fp8)
        engine = TrainEngine(root / name / "model", config, layout, value_head=value_head)
        engine.update(Sequences.of([[5, 6, 7, 8], [9, 8, 7]]), loss)
        save = EngineCheckpoint(engine)
        directory = root / name / "checkpoint" / "critic"
        save.begin(directory, background=False)
        saved[name] = (save.summary, [_below("critic", entry) for entry in save.finish()])
        for exported in ("bfloat16", "float32"):
            engine.export(root / name / f"exported-{exported}", dtype=getattr(torch, exported))
        if layout.tp == 1:  # else a rank has a part of a block of these small matrices
            engine.export(root / name / "exported-fp8", precision="fp8")
        engine.close()
    return saved


def _below(role: str, entry: FileEntry) -> FileEntry:
    return FileEntry(f"{role}/{entry.path}", entry.size, entry.checksum)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_an_export_is_what_the_engine_exports(runs: Path, tmp_path: Path, name: str) -> None:
    dtype = CASES[name][1]
    export_checkpoint(runs / name / "checkpoint", tmp_path / "export", role="critic", dtype=dtype)
    assert _files(tmp_path / "export") == _files(runs / name / f"exported-{dtype}")
    before, after = _tensors(runs / name / "model"), _tensors(tmp_path / "export")
    changed = [key for key in before.keys() & after.keys() if not torch.equal(after[key], before[key].to(after[key]))]
    assert len(changed) > len(after) / 2  # by the update


@pytest.mark.processes
@pytest.mark.parametrize("name", [name for name, (layout, _, _) in CASES.items() if layout.tp == 1])
def test_an_export_in_fp8_is_what_the_engine_exports(runs: Path, tmp_path: Path, name: str) -> None:
    exported = export_checkpoint(runs / name / "checkpoint", tmp_path / "export", role="critic", precision="fp8")
    assert exported.dtype == f"fp8 and {CASES[name][1]}"
    assert _files(tmp_path / "export") == _files(runs / name / "exported-fp8")
    fp8 = LEFT_OUT.get(name, NOTHING_LEFT_OUT)
    spec = fp8.applied(load_model_spec(tmp_path / "export", value_head=CASES[name][2]))
    plain = export_checkpoint(runs / name / "checkpoint", tmp_path / "plain", role="critic")
    assert exported.nbytes < plain.nbytes
    quantised = 0
    with TensorFiles(tmp_path / "export") as files, TensorFiles(tmp_path / "plain") as before:
        for tensor in spec.hf_tensors.values():
            box = tuple((0, size) for size in tensor.shape)
            if tensor.fp8:
                values, scales = quantise(before.read(tensor.name, box))
                assert torch.equal(files.stored(tensor.name, box).view(torch.uint8), values.view(torch.uint8))
                assert torch.equal(files.stored(scale_name(tensor.name), scale_box(box)), scales)
                quantised += 1
            else:
                assert torch.equal(files.stored(tensor.name, box), before.stored(tensor.name, box))
    assert quantised >= 7 * (spec.sizes.layers - sum(fp8.given.values()))


@pytest.mark.processes
def test_float32_weights_of_bfloat16_training_are_the_masters(runs: Path, tmp_path: Path) -> None:
    export_checkpoint(runs / "qwen3-tied" / "checkpoint", tmp_path / "export", role="critic", dtype="float32")
    masters, weights = _tensors(tmp_path / "export"), _tensors(runs / "qwen3-tied" / "exported-float32")
    assert any(not torch.equal(master, weights[name]) for name, master in masters.items())
    assert all(torch.equal(master.bfloat16(), weights[name].bfloat16()) for name, master in masters.items())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["qwen3_moe", "llama-biases"])
def test_an_export_loads_in_transformers(runs: Path, tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    value_head = CASES[name][2]
    export_checkpoint(
        runs / name / "checkpoint", tmp_path / "export", role="critic", dtype="float32", max_shard_bytes=50e3
    )
    assert (tmp_path / "export" / INDEX).is_file()
    kind: Any = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    model, report = kind.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values())
    saved = _tensors(tmp_path / "export")
    # Experts are one tensor in transformers.
    same = [torch.equal(value, saved[key]) for key, value in model.state_dict().items() if key in saved]
    assert all(same) and len(same) > 10


# What was imported ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights in bf16 with float32 buffers, in several files, and a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "deepseek"
    initialise_random(model_spec(DEEPSEEK), directory, seed=1, dtype=torch.bfloat16, max_shard_bytes=20e3)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture(scope="module")
def imported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    import_checkpoint(model, root)
    return root / "step-00000000"


@pytest.fixture
def copy(imported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(imported, tmp_path / "step-00000000"))


def test_what_is_imported_is_exported(model: Path, imported: Path, tmp_path: Path) -> None:
    exported = export_checkpoint(imported, tmp_path / "export", max_shard_bytes=20e3)
    assert _files(tmp_path / "export") == _files(model)
    size = sum(path.stat().st_size for path in (tmp_path / "export").glob("*.safetensors"))
    assert exported == Exported("bfloat16", size)


@pytest.mark.parametrize(
    ("trained_in", "dtype"), [("float32", "float32"), ("float16", "float16"), ("bfloat16, float32", "float32")]
)
def test_an_export_has_the_dtype_that_was_trained_in(copy: Path, tmp_path: Path, trained_in: str, dtype: str) -> None:
    manifest = read_manifest(copy)
    roles = {role: replace(summary, dtype=trained_in) for role, summary in manifest.roles.items()}
    write_manifest(copy, replace(manifest, roles=roles))
    assert export_checkpoint(copy, tmp_path / "export").dtype == dtype
    spec = load_model_spec(copy / "model")
    expected = torch.float32, getattr(torch, dtype)
    for name, tensor in _tensors(tmp_path / "export").items():
        assert tensor.dtype == expected[not spec.hf_tensors[name].buffer], name


def test_an_imported_checkpoint_is_whole(imported: Path) -> None:
    manifest = read_manifest(imported)
    assert manifest.step == 0 and set(manifest.roles) == {"actor"}
    summary = manifest.roles["actor"]
    assert (summary.dtype, summary.value_head, summary.optimizer_step) == ("bfloat16", False, None)
    assert summary.parameters == load_model_spec(imported / "model").parameter_count()
    listed = {entry.path: entry for entry in manifest.files}
    there = {path.relative_to(imported).as_posix() for path in imported.rglob("*") if path.is_file()}
    assert listed.keys() == there - {"manifest.json"}
    assert {"model/config.json", "model/tokenizer.json", "actor/.metadata"} < listed.keys()
    assert all(entry == file_entry(imported, imported / path) for path, entry in listed.items())


@pytest.mark.processes
def test_a_run_starts_from_an_imported_checkpoint(model: Path, imported: Path, tmp_path: Path) -> None:
    run_distributed(_load_and_export, 2, model, imported / "actor", tmp_path / "export", timeout_s=300)
    exported, original = _tensors(tmp_path / "export"), _tensors(model)
    assert exported.keys() == original.keys()
    assert all(torch.equal(value, original[key]) for key, value in exported.items())


def _load_and_export(model: Path, actor: Path, out: Path) -> None:
    from engine3d.checkpoint.writing.save import EngineCheckpoint
    from engine3d.training.config import TrainConfig
    from engine3d.training.engine import TrainEngine

    engine = TrainEngine(model, TrainConfig(dtype="bfloat16"), Layout(ep=2, dp=2), load=False)
    loaded = EngineCheckpoint(engine).load(actor)
    assert (loaded.optimizer_step, loaded.same_layout) == (None, False)
    engine.export(out)
    engine.close()


# A model with a vision tower is not made at random.
ONE_EACH = {family_of(name): name for name, config in CONFIGS.items() if "text_config" not in config}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ONE_EACH.values()))
def test_a_family_is_exported_in_fp8(name: str, tmp_path: Path) -> None:
    spec = model_spec(CONFIGS[name])
    initialise_random(spec, tmp_path / "model", seed=1, dtype=torch.bfloat16)
    import_checkpoint(tmp_path / "model", tmp_path / "checkpoints")
    checkpoint, out = tmp_path / "checkpoints" / "step-00000000", tmp_path / "export"
    if spec.sizes.expert_biases:
        with pytest.raises(UserError, match=r"^fp8: the experts of GptOssForCausalLM are tensors of all experts"):
            export_checkpoint(checkpoint, out, precision="fp8")
        return
    export_checkpoint(checkpoint, out, precision="fp8", multi_token=False)
    exported, original = _tensors(out), _tensors(tmp_path / "model")
    expected = dict(original)
    for tensor in spec.hf_tensors.values():
        if tensor.fp8:
            expected[tensor.name], expected[scale_name(tensor.name)] = quantise(original[tensor.name])
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[key].float(), value.float()) for key, value in expected.items())
    with TensorFiles(out) as files:  # what is trained from it has these values
        for tensor in spec.hf_tensors.values():
            if tensor.fp8:
                box = tuple((0, size) for size in tensor.shape)
                dequantised = dequantise(exported[tensor.name], exported[scale_name(tensor.name)], box)
                assert torch.equal(files.read(tensor.name, box).float(), dequantised.bfloat16().float())


def test_a_directory_in_fp8_is_no_checkpoint(imported: Path, tmp_path: Path) -> None:
    export_checkpoint(imported, tmp_path / "fp8", precision="fp8")
    with pytest.raises(UserError, match=r"^import: .*fp8 has weights in fp8, such as model\.layers\.0\.mlp\.down_proj"):
        import_checkpoint(tmp_path / "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_imports_leave_nothing(model: Path, imported: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^import: .*step-00000000 exists already; expected a folder without it$"):
        import_checkpoint(model, imported.parent)
    assert (imported / "manifest.json").is_file()
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    file = next(broken.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"^.*safetensors: damaged: expected \d+ bytes by its header, found \d+$"):
        import_checkpoint(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match=r"^import: .*Not a directory"):
        import_checkpoint(model, tmp_path / "file")


# What cannot be exported ----------------------------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Path], None]:
    """Another config, and a manifest that knows its size: what came of a checkpoint made for another model."""

    def change(checkpoint: Path) -> None:
        path = checkpoint / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        manifest = read_manifest(checkpoint)
        others = [entry for entry in manifest.files if entry.path != "model/config.json"]
        write_manifest(checkpoint, replace(manifest, files=(*others, file_entry(checkpoint, path))))

    return change


def _largest(checkpoint: Path) -> Path:
    return max((checkpoint / "actor").glob("*.distcp"), key=lambda file: file.stat().st_size)


def _truncate(checkpoint: Path) -> None:
    file = _largest(checkpoint)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _overwrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def _flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def _without_chunk_checksums(checkpoint: Path) -> None:
    """Remove the checksums of chunks, which older formats lack."""
    manifest = read_manifest(checkpoint)
    (checkpoint / "actor" / "__0.checksums.json").unlink()
    files = tuple(entry for entry in manifest.files if not entry.path.endswith(".checksums.json"))
    write_manifest(checkpoint, replace(manifest, files=files))


def _flip_without_chunk_checksums(checkpoint: Path) -> None:
    _without_chunk_checksums(checkpoint)
    _flip(_largest(checkpoint), -1000)


_VERIFY = r"`hybridflow checkpoint verify .*` says what is damaged$"

BAD: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "role": (lambda at: None, {"role": "judge"}, r"^export: .*-00000000 has no role judge; expected one of actor$"),
    "dtype": (lambda at: None, {"dtype": "int8"}, r"^export: dtype torch.int8: expected one of "),
    "no dtype": (lambda at: None, {"dtype": "fast"}, r"^export: dtype fast: expected such as bfloat16, float16 or"),
    "layers": (
        _config(num_hidden_layers=5),
        {},
        r"^checkpoint .*: actor/ does not fit model/config.json: it has no tensor model\.layers\.4\.",
    ),
    "fewer layers": (
        _config(num_hidden_layers=3),
        {},
        r"does not fit model/config.json: it has tensor model\.layers\.3\..*, which the model has not$",
    ),
    "vocabulary": (
        _config(vocab_size=98),
        {},
        r"tensor model\.embed_tokens\.weight has shape \[97, 32\], expected \[98, 32\]$",
    ),
    "short": (_truncate, {}, r"^checkpoint .*: actor/__0_\d\.distcp has [\d,]+ bytes, expected [\d,]+$"),
    "no file": (lambda at: _largest(at).unlink(), {}, r"^checkpoint .*: actor/__0_\d\.distcp is missing$"),
    "damaged": (
        lambda at: _overwrite(_largest(at)),
        {},
        rf"^checkpoint .*: actor/__0_\d\.distcp is damaged: bytes .* that were saved \(.*\); {_VERIFY}",
    ),
    "one bit": (
        lambda at: _flip(_largest(at), -1000),
        {},
        rf"^checkpoint .*: actor/__0_\d\.distcp is damaged: bytes .* that were saved \(model\..*\); {_VERIFY}",
    ),
    "one bit, no checksums of pieces": (
        _flip_without_chunk_checksums,
        {},
        rf"^checkpoint .*: actor/__0_\d\.distcp is damaged: its checksum is not that of the manifest; {_VERIFY}",
    ),
    "checksums": (
        lambda at: _flip(at / "actor" / "__0.checksums.json", 40),
        {},
        rf"^checkpoint .*: actor/__0\.checksums\.json is damaged: its checksum .* of the manifest; {_VERIFY}",
    ),
    "model": (
        lambda at: _flip(at / "model" / "config.json", 40),
        {},
        rf"^checkpoint .*: model/config\.json is damaged: its checksum is not that of the manifest; {_VERIFY}",
    ),
    "tokenizer": (
        lambda at: _flip(at / "model" / "tokenizer.json", 0),
        {},
        rf"^checkpoint .*: model/tokenizer\.json is damaged: its checksum is not that of the manifest; {_VERIFY}",
    ),
    "metadata": (
        lambda at: _overwrite(at / "actor" / ".metadata"),
        {},
        rf"^checkpoint .*: actor/\.metadata is damaged: its checksum is not that of the manifest; {_VERIFY}",
    ),
    "not finished": (
        lambda at: (at / "manifest.json").unlink(),
        {},
        r"^checkpoint .*: it has no manifest\.json: it is",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_exported_is_named_in_one_line(copy: Path, tmp_path: Path, kind: str) -> None:
    spoil, options, message = BAD[kind]
    spoil(copy)
    with pytest.raises(UserError, match=message) as caught:
        export_checkpoint(copy, tmp_path / "export", **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000000"]  # nothing half-written


def test_damage_is_exported_where_the_user_says_so(copy: Path, tmp_path: Path) -> None:
    _flip(_largest(copy), -1000)
    export_checkpoint(copy, tmp_path / "export", verify=False)
    assert (tmp_path / "export" / "config.json").is_file()


@pytest.mark.slow
def test_every_reader_of_a_chunk_compares_it(copy: Path) -> None:
    from engine3d.checkpoint.reading.reader import CheckpointReader, fill
    from engine3d.checkpoint.writing.writer import alone, sharded_tensor

    def read(*, verify: bool = True) -> list[str]:
        """Every piece of every tensor in turn; what is said of the damaged ones."""
        said = []
        with alone(), CheckpointReader(copy / "actor", verify=verify) as reader:
            for name, stored in reader.metadata.state_dict_metadata.items():
                if not name.startswith("weight/"):
                    continue
                assert isinstance(stored, TensorStorageMetadata)
                values = torch.empty(stored.size, dtype=stored.properties.dtype)
                box = tuple((0, size) for size in stored.size)
                try:
                    fill(reader, {name: sharded_tensor(name, values, box, tuple(stored.size))})
                except EngineError as error:
                    said.append(str(error))
        return said

    assert read() == []
    size = _largest(copy).stat().st_size
    for position in (10, size // 2, size - 1):  # in the head of an archive, in values, in its tail
        _flip(_largest(copy), position)
        (line,) = read()
        damage = (
            rf"{_largest(copy)} (is damaged: bytes [\d,]+ to [\d,]+ are not those that were saved|cannot be read: .*)"
        )
        assert re.fullmatch(
            rf"{damage}( \(weight/.*\))?; `hybridflow checkpoint verify {copy}` says what is damaged", line
        )
        _flip(_largest(copy), position)
    _flip(_largest(copy), size // 2)
    assert read(verify=False) == []


def test_an_export_replaces_nothing(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match=r"^export: .*export exists already"):
        export_checkpoint(imported, tmp_path / "export")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(EngineError, match=r"^export: .*Not a directory"):
        export_checkpoint(imported, tmp_path / "file" / "export")


# Memory ---------------------------------------------------------------------------------------------------------------

_MEASURED = """
import sys, threading, time
from pathlib import Path
from engine3d.checkpoint import hf
from engine3d.checkpoint.writing import writer

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.002)

before = most = anonymous()
threading.Thread(target=watch, daemon=True).start()
getattr(hf, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3]))
print(most - before)
"""


@pytest.mark.long
@pytest.mark.processes
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """At most a few chunks of 660 MB of weights are resident. Mapped files, which the kernel may drop, do not count."""
    large = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32768, "num_hidden_layers": 6}
    config = CONFIGS["llama"] | large | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    spec = model_spec(config)
    assert 4 * spec.parameter_count() > 660e6
    initialise_random(spec, tmp_path / "model", seed=1, dtype=torch.float32)
    steps = {"import_checkpoint": ("model", "root"), "export_checkpoint": ("root/step-00000000", "export")}
    for function, paths in steps.items():
        arguments = [function, *(str(tmp_path / path) for path in paths)]
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED, *arguments], capture_output=True, text=True, timeout=300, check=True
        )
        assert int(done.stdout.split()[-1]) < 260e6, function
    exported, original = _tensors(tmp_path / "export"), _tensors(tmp_path / "model")
    assert all(torch.equal(exported[name], weight) for name, weight in original.items())


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
