"""Learning curves on the pages equal the results that are kept."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning import Learned, read

ROOT = Path(__file__).parents[2]


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_curves", ROOT / "docs/generate_curves.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_tell_what_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["docs/generate_curves.py", "--check"])
    assert _generator().main() == 0, capsys.readouterr().err


def test_means_over_seeds_stand_beside_the_recipe_and_curves_on_its_page(tmp_path: Path) -> None:
    for name, last in {"gspo": 0.5, "gspo_token": 0.7, "ippo.adder": 0.9, "ippo.brief": 0.8}.items():
        (tmp_path / name).mkdir()
        for seed, more in ((1, 0.0), (2, 0.1)):
            result = Learned(name, seed, [(0, 0.25), (20, last + more)], "eval/accuracy", [], 1.0, "", "", {})
            (tmp_path / name / f"seed-{seed}.json").write_text(json.dumps(result.__dict__))
    generator = _generator()
    pages = dict(generator.pages(tmp_path))
    rows = {line.split("`")[1]: line for line in pages[generator.TABLE].splitlines() if line.startswith("| [`")}
    assert rows["gspo"].endswith("| [0.25 → 0.55](algorithms/curves/gspo.svg) |")
    assert rows["ippo"].endswith(
        "](algorithms/curves/ippo.adder.svg), [0.25 → 0.85](algorithms/curves/ippo.brief.svg) |"
    )
    assert rows["ppo"].endswith(" |  |")
    gspo = pages[ROOT / "docs/algorithms/gspo.md"]
    assert gspo.count(generator.HEADING) == 1 and "Mean over 2 seeds" in gspo
    assert "![gspo: 0.25 → 0.55](curves/gspo.svg)\n![gspo_token: 0.25 → 0.75](curves/gspo_token.svg)\n" in gspo
    for path, text in pages.items():  # nothing is told twice where it is written again
        names = ["gspo", "gspo_token"] if path.name == "gspo.md" else []
        if path == generator.TABLE:
            assert generator.table(text, tmp_path) == text
        elif names:
            assert generator.page(text, names, tmp_path) == text


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_what_staleness_costs_is_what_is_kept(staleness: int) -> None:
    results = ROOT / "benchmarks/results/staleness"
    lasts = []
    for name in (f"staleness-{staleness}", f"staleness-{staleness}-uncorrected"):
        runs = read(results, name)
        assert [run.seed for run in runs] == [1, 2, 3]
        last = [run.evaluations[-1][1] for run in runs]
        lasts.append(f"{sum(last) / 3:.3f} ({min(last):.3f} to {max(last):.3f})")
    assert f"| {staleness} | {lasts[0]} | {lasts[1]} |" in (ROOT / "docs/async_rollout.md").read_text()
