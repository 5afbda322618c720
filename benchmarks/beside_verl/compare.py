"""This project and verl in turn on one GPU, with the same model, prompts and lengths.

    python benchmarks/beside_verl/compare.py --directory runs/beside-verl [--workload fixed] [--rounds 2] [--verl DIR]

installs verl into a folder (`verl.lock`), makes the model and the prompts, runs each variant of `variants.yaml` in
turn, `--rounds` times, and writes `comparison.md` and `comparison.json` into the directory of the workload. A run is a
process in its own session with a limit, after which all that it started is killed. Runs that are there already and
ended well are kept, so that a comparison can be made in several calls. A run that fails does not end the comparison.

verl's code is used as it is installed. `variants.yaml` lists the changes at run time, and `verl_path/` has them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import yaml

from benchmarks import make_model
from benchmarks.beside_verl.logs import StepRecord, checked, read_ours, read_verl
from benchmarks.beside_verl.table import VariantSteps, lines, summary
from benchmarks.beside_verl.workloads import WORKLOADS, Workload, write_prompts
from benchmarks.reshard_plan import Parser, versions
from benchmarks.series import CUT_OFF, run_command
from engine3d.errors import UserError
from engine3d.models import load_model_spec
from hybridflow.cluster.devices.nvml import NvmlReader
from hybridflow.config.recipe import load_recipe
from hybridflow.data.tokenizer import CHAT_CHARACTERS

_HERE = Path(__file__).resolve().parent
_REPOSITORY = _HERE.parents[1]
_VERL_PATH = _HERE / "verl_path"
_RECIPE = _HERE / "ours.yaml"
_REWARD = _HERE.parent / "drawn_reward.py"
_SYSTEMS = ("ours", "verl")
_RESULT = "result.json"
_THREADS = "threads.jsonl"
_LAST_LINES = 15
_INTERVAL_S = 0.25
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code is 1 if a run failed or did other work, 2 for wrong arguments."""
    try:
        options = _parser().parse_args(arguments)
        variants = yaml.safe_load((_HERE / "variants.yaml").read_text())
        names = chosen_variants(variants, options.variants, WORKLOADS[options.workload])
        _check(options)
        directory = (options.directory / options.workload).resolve()
        workload = WORKLOADS[options.workload]
        directory.mkdir(parents=True, exist_ok=True)
        model = _model(options, workload)
        if not options.table_only:
            names_of_run = _run_names(options, directory, directory)
            recipe = load_recipe(_RECIPE, commands_settings(variants, "ours", "", workload, names_of_run))
            write_prompts(
                directory, workload, _steps(options), order_seed=recipe.order_seed, alphabet=CHAT_CHARACTERS[1:]
            )
            verl = _verl(options) if any(name.startswith("verl ") for name in names) else None
            run_all(options, variants, names, directory, verl)
        return write_table(options, variants, names, directory, model)
    except UserError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser(prog="compare.py", description="This project and verl in turn on one GPU.")
    parser.add_argument("--directory", type=Path, required=True, help="for the model, the runs and the table")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="fixed")
    parser.add_argument("--variants", help="such as 'ours tuned,verl tuned', in the order of a round; all if not given")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each variant")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--warm-up", type=int, default=1, help="steps before those")
    parser.add_argument("--limit-s", type=float, default=900, help="seconds of a run")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all runs: none begins later")
    parser.add_argument("--model", type=Path, help="a model that make_model.py made for the workload")
    parser.add_argument("--verl", type=Path, help="a folder with verl, for machines without a package registry")
    parser.add_argument("--ours-set", nargs="*", default=[], metavar="key=value", help="further settings of our runs")
    parser.add_argument("--verl-set", nargs="*", default=[], metavar="key=value", help="further settings of verl's")
    parser.add_argument("--table-only", action="store_true", help="write the table of the runs that are there")
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.rounds < 1 or options.steps < 1 or options.warm_up < 0 or options.limit_s <= 0:
        raise UserError("expected --rounds and --steps of at least 1, --warm-up of at least 0 and --limit-s above 0")
    for name in ("model", "verl"):
        path = getattr(options, name)
        if path is not None and not path.is_dir():
            raise UserError(f"--{name}: {path} is no directory")
    if options.verl is not None and not (options.verl / "verl/trainer/main_ppo.py").is_file():
        raise UserError(f"--verl: {options.verl} has no verl, expected a folder that uv pip install --target made")


def chosen_variants(variants: Mapping[str, Any], names: str | None, workload: Workload) -> list[str]:
    """Names of the variants to run, such as `ours tuned`; of this project alone on a CPU.

    Raises:
        UserError: a name is unknown.
    """
    systems = _SYSTEMS[:1] if workload.cpu else _SYSTEMS
    depth = max(len(variants[system]["variants"]) for system in systems)
    known = [
        f"{system} {variant}"
        for index in range(depth)
        for system in systems
        for variant in list(variants[system]["variants"])[index : index + 1]
    ]
    if names is None:
        return ["ours defaults"] if workload.cpu else known
    requested = [name.strip() for name in names.split(",")]
    for name in requested:
        if name not in known:
            raise UserError(f"--variants: {name!r}, expected names of {', '.join(known)}")
    return list(dict.fromkeys(requested))


def _steps(options: argparse.Namespace) -> int:
    return int(options.steps + options.warm_up)


def _run_names(options: argparse.Namespace, directory: Path, run: Path) -> dict[str, object]:
    return {
        "directory": directory,
        "model": _model_path(options),
        "reward": os.path.relpath(_REWARD),
        "run": run,
        "steps": _steps(options),
        "verl_path": _VERL_PATH,
    }


def commands_settings(
    variants: Mapping[str, Any], system: str, variant: str, workload: Workload, names: Mapping[str, object]
) -> list[str]:
    """Settings of a run, without those of a variant if `variant` is empty.

    Args:
        variants: contents of `variants.yaml`.
        system: `ours` or `verl`.
        variant: of that system.
        workload: whose names the settings have.
        names: of the run.
    """
    of_system = variants[system]
    settings = [*of_system["common"], *(of_system["cpu"] if workload.cpu else [])]
    settings += of_system["variants"][variant]["settings"] if variant else []
    values = workload.settings() | dict(names)
    return [setting.format_map(values) for setting in settings]


def _model_path(options: argparse.Namespace) -> Path:
    kind = "small-model" if WORKLOADS[options.workload].cpu else "model"
    return Path(options.model or options.directory / kind).resolve()


def _model(options: argparse.Namespace, workload: Workload) -> Path:
    path = _model_path(options)
    if not path.exists() and make_model.main([*workload.model, "--directory", str(path)]):
        raise UserError(f"the model {path} could not be made")
    return path


def _verl(options: argparse.Namespace) -> Path:
    """Return the folder with verl; install it if none is given."""
    if options.verl is not None:
        return Path(options.verl).resolve()
    target = (options.directory / "verl").resolve()
    if not target.exists():
        command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--target", str(target)]
        command += ["--no-deps", "--require-hashes", "-r", str(_HERE / "verl.lock")]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            shutil.rmtree(target, ignore_errors=True)
            raise UserError("verl could not be installed; expected a package registry, or its folder as --verl")
    return target


def run_all(
    options: argparse.Namespace, variants: Mapping[str, Any], names: Sequence[str], directory: Path, verl: Path | None
) -> None:
    """Run the variants in turn, all of them once in each round. Runs that ended well before are kept."""
    deadline = time.monotonic() + options.within
    _adopt_orphans()
    for number in range(options.rounds):
        for name in names:
            run = directory / f"{name.replace(' ', '-')}-{number}"
            if _result(run).get("exit_code") == 0:
                continue
            if time.monotonic() >= deadline:
                print(f"{run.name}: not begun, {options.within:g} s have passed", file=sys.stderr)
                continue
            shutil.rmtree(run, ignore_errors=True)
            command, environment = run_of(options, variants, name, directory, run, verl)
            with _peak_memory() as peak, _host_threads(run):
                result = run_command(command, run, options.limit_s, environment)
            _end_orphans()
            result |= {"command": command, "peak_bytes": max(peak, default=None), "steps": _steps(options)}
            (run / _RESULT).write_text(json.dumps(result, indent=2) + "\n")
            print(f"{run.name}: exit code {result['exit_code']} after {result['seconds']:.0f} s", file=sys.stderr)


def run_of(
    options: argparse.Namespace,
    variants: Mapping[str, Any],
    name: str,
    directory: Path,
    run: Path,
    verl: Path | None,
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a run."""
    system, variant = name.split(maxsplit=1)
    settings = commands_settings(
        variants, system, variant, WORKLOADS[options.workload], _run_names(options, directory, run)
    )
    if system == "ours":
        command = [sys.executable, "-m", "hybridflow", "train", str(_RECIPE), *settings, *options.ours_set]
        return command, dict(os.environ)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings, *options.verl_set]
    return command, verl_environment(verl, run)


def verl_environment(verl: Path | None, run: Path) -> dict[str, str]:
    """Environment of verl's processes, with the changes of `verl_path/`."""
    path = [str(_VERL_PATH), str(verl), str(_REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "VERL_FILE_LOGGER_PATH": str(run / "metrics.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": "rollout_mismatch",
        "HYDRA_FULL_ERROR": "1",
    }


def _adopt_orphans() -> None:
    """Become the parent of processes whose parent ends, so that `_end_orphans` sees those of another session."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_orphans() -> None:
    orphans = psutil.Process().children(recursive=True)
    for process in orphans:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(orphans, timeout=30)


@contextlib.contextmanager
def _peak_memory() -> Iterator[list[int]]:
    """Collect the memory in use on the first GPU by NVML, in bytes; nothing without a GPU."""
    samples: list[int] = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[:1]
    try:
        reader = NvmlReader(visible)
    except Exception:  # NVML's own: no library, or no GPU
        yield samples
        return
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(_INTERVAL_S):
            samples.append(reader.read(reader.gpus[0]).memory_bytes)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def _host_threads(run: Path) -> Iterator[None]:
    """Sample the threads of the host, in a process of its own, into the directory of a run."""
    run.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, str(_HERE / "host_threads.py"), str(run / _THREADS)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _result(run: Path) -> dict[str, Any]:
    path = run / _RESULT
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write_table(
    options: argparse.Namespace, variants: Mapping[str, Any], names: Sequence[str], directory: Path, model: Path
) -> int:
    """Write and print the table of the runs in a directory; the exit code is 1 if there is a problem with one."""
    workload = WORKLOADS[options.workload]
    flops, peak_flops = workload.update_flops(load_model_spec(model)), _peak_flops()
    read = {name: read_variant(name, variants, workload, directory, options.warm_up) for name in names}
    summaries = {name: summary(variant, flops, peak_flops) for name, variant in read.items()}
    problems = [f"{name}: {problem}" for name, variant in read.items() for problem in variant.problems]
    text = [f"{options.workload}: {workload.description}.", "", *lines(summaries), ""]
    text += ["Medians of all measured steps, with ranges. MFU: model FLOPs of an update over its seconds.", ""]
    text += [f"- {name}: {variant.note}" for name, variant in read.items()]
    text += ["", "Changes of verl at run time:", "", *(f"- {change}" for change in variants["changes"])]
    text += ["", "Further differences:", "", *(f"- {difference}" for difference in variants["differences"])]
    text += ["", *(f"Problem: {problem}" for problem in problems)] if problems else []
    (directory / "comparison.md").write_text("\n".join(text) + "\n")
    report = {
        "command": " ".join(["benchmarks/beside_verl/compare.py", *sys.argv[1:]]),
        "workload": options.workload,
        "update_flops": flops,
        "peak_flops": peak_flops,
        "variants": summaries,
        "versions": versions() | _verl_versions(options),
    }
    (directory / "comparison.json").write_text(json.dumps(report, indent=2) + "\n")
    print("\n".join(text))
    return int(bool(problems))


def read_variant(
    name: str, variants: Mapping[str, Any], workload: Workload, directory: Path, warm_up: int
) -> VariantSteps:
    """Read all runs of a variant."""
    system, variant = name.split(maxsplit=1)
    steps: list[StepRecord] = []
    problems: list[str] = []
    peaks: list[int] = []
    runs = sorted(run for run in directory.glob(f"{name.replace(' ', '-')}-*") if _result(run))
    for run in runs:
        result = _result(run)
        if result["exit_code"] != 0:
            reason = "was cut off" if result["exit_code"] == CUT_OFF else f"ended with exit code {result['exit_code']}"
            problems.append(f"{run.name} {reason} after {result['seconds']:.0f} s:\n\n```\n{_last_lines(run)}\n```\n")
        try:
            read = read_ours(run / "ours/metrics.jsonl") if system == "ours" else read_verl(run / "metrics.jsonl")
        except UserError as error:
            problems.append(f"{run.name}: {error}")
            continue
        if (other := checked(read, workload.tokens, workload.response_tokens)) is not None:
            problems.append(f"{run.name}: {other}")
        steps += read[warm_up:]
        peaks += [] if result["peak_bytes"] is None else [result["peak_bytes"]]
    if not runs:
        problems.append("no run has ended")
    note = variants[system]["variants"][variant]["note"]
    return VariantSteps(name, note, steps, len(runs), max(peaks, default=None), problems)


def _last_lines(run: Path) -> str:
    text = "\n".join(
        (run / name).read_text(errors="replace") for name in ("stdout", "stderr") if (run / name).is_file()
    )
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _peak_flops() -> float | None:
    """Dense bf16 rate of the GPU. Asked for in a process of its own, whose CUDA context ends with it."""
    code = "from engine3d.platform import platform; print(platform.peak_flops or '')"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=_REPOSITORY)
    last = output.stdout.split()[-1:]
    return float(last[0]) if last else None


def _verl_versions(options: argparse.Namespace) -> dict[str, str]:
    folder = options.verl or options.directory / "verl"
    return {
        name: distribution.version
        for distribution in importlib.metadata.distributions(path=[str(folder)])
        if (name := distribution.metadata["Name"]) in ("verl", "megatron-bridge")
    }


if __name__ == "__main__":
    sys.exit(main())
