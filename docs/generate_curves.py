"""Learning curves of the algorithms' recipes: a column of docs/algorithms.md, and plots on the algorithms' pages.

python docs/generate_curves.py            after benchmarks/learning.py --draw
python docs/generate_curves.py --check    says whether the pages are what is kept
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning import RESULTS, read  # noqa: E402

TABLE = ROOT / "docs/algorithms.md"
COLUMN = "learning curve"
HEADING = "## Learning curve"
BESIDE = {
    "corrections.md": ("corrected",),
    "environments.md": ("game", "tools"),
    "fp8.md": ("fp8", "fp8-training"),
    "placement.md": ("context-parallel", "four-ranks"),
    "rewards.md": ("code",),
    "routing_replay.md": ("routing-replay",),
}
"""Pages of what is no algorithm, and their recipes."""
_RECIPE = re.compile(r"\]\(\.\./launch/recipes/(?:\w+/)?([\w-]+)\.yaml\)")
_PAGE = re.compile(r"\]\((algorithms/\w+\.md)\)")
_SPLIT = re.compile(r"(?<!\\)\|")


def kept(recipe: str, results: Path) -> list[str]:
    """The names by which it is kept what a recipe has learned: its own, or one for each actor."""
    single = [recipe] if (results / recipe).is_dir() else []
    return single + sorted(path.name for path in results.glob(f"{recipe}.*") if path.is_dir())


def ends(name: str, results: Path) -> str:
    """The first and the last evaluation: means over the seeds."""
    runs = read(results, name)
    first, last = (np.mean([run.evaluations[end][1] for run in runs]) for end in (0, -1))
    return f"{first:.2f} → {last:.2f}"


def table(text: str, results: Path) -> str:
    """The page of all algorithms, with the column."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("|"):
            lines.append(line)
            continue
        cells = [cell.strip() for cell in _SPLIT.split(line)[1:-1]]
        if cells[0] == "name":
            column = cells.index(COLUMN) if COLUMN in cells else len(cells)
            cells[column:] = [COLUMN]
        elif set("".join(cells)) == {"-"}:
            cells[column:] = ["---"]
        else:
            names = [name for recipe in _RECIPE.findall(cells[column - 1]) for name in kept(recipe, results)]
            cells[column:] = [", ".join(f"[{ends(name, results)}](algorithms/curves/{name}.svg)" for name in names)]
        lines.append(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def page(text: str, names: list[str], results: Path, folder: str = "curves") -> str:
    """A page, with the curves of these recipes at its end, drawn in a folder beside it."""
    body = text.split(f"\n{HEADING}\n")[0].rstrip("\n") + "\n"
    if not names:
        return body
    counts = {len(read(results, name)) for name in names}
    curves = [f"![{name}: {ends(name, results)}]({folder}/{name}.svg)" for name in names]
    drawn = "Means over the seeds, lowest and highest"
    if len(counts) == 1:
        (seeds,) = counts
        drawn = f"Mean over {seeds} seeds, lowest and highest" if seeds > 1 else "One seed"
    said = f"{drawn}; the demo's GRPO beside it where the figure is the same."
    command = (
        "`benchmarks/learning.py` runs the recipes and draws what is kept of them in `benchmarks/results/learning`."
    )
    return "\n".join([body, HEADING, "", said, command, "", *curves, ""])


def pages(results: Path = RESULTS) -> Iterator[tuple[Path, str]]:
    """Every page that tells what recipes learn, as it should be; none where nothing is kept."""
    if not results.is_dir():
        return
    text = table(TABLE.read_text(), results)
    yield TABLE, text
    by_page: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| [") and (match := _PAGE.search(line)):
            recipes = _RECIPE.findall(line)
            by_page.setdefault(match[1], []).extend(name for recipe in recipes for name in kept(recipe, results))
    for name, names in by_page.items():
        path = ROOT / "docs" / name
        yield path, page(path.read_text(), list(dict.fromkeys(names)), results)
    for name, beside in BESIDE.items():
        path = ROOT / "docs" / name
        names = [name for recipe in beside for name in kept(recipe, results)]
        yield path, page(path.read_text(), names, results, "algorithms/curves")


def main() -> int:
    wrong = [path for path, text in pages() if path.read_text() != text]
    if "--check" not in sys.argv[1:]:
        for path, text in list(pages()):
            path.write_text(text)
        return 0
    for path in wrong:
        print(f"{path.name} does not tell what is kept; renew it: python docs/generate_curves.py", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
