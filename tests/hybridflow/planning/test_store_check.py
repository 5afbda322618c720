"""Settings of the sample store, and what a check says of its size."""

from __future__ import annotations

import pytest

from hybridflow.cli.main import main
from hybridflow.config.recipe import load_recipe
from hybridflow.config.yaml_loader import SettingsError
from hybridflow.planning.store_check import store_notes
from tests.support.resumable import DEMO

STEP = ["trainer.prompts_per_step=100", "rollout.samples_per_prompt=10"]


def notes(*overrides: str, tokens: int = 1000) -> list[str]:
    return store_notes(load_recipe(DEMO, [*STEP, *overrides]), tokens)


def test_a_step_that_may_outgrow_the_store_is_told() -> None:
    line = (
        "samples.keep_mb=4: 1,000 samples of up to 1,000 tokens may take 5 MB, and then only those of the newest step "
        "are kept"
    )
    assert notes("samples.keep_mb=4") == [line]
    assert notes("samples.keep_mb=5") == notes("samples.keep_mb=null") == notes("samples.store=false") == notes() == []
    assert notes("samples.store=false", tokens=10**9) == []


def test_a_check_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    many = ["trainer.prompts_per_step=20000", "samples.keep_mb=1"]
    assert main(["check", str(DEMO), *many]) == 0
    assert "samples.keep_mb=1: 160,000 samples of up to " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["samples.keep_mb=0"], "samples.keep_mb = 0: expected at least 1"),
        (["samples.store=false", "samples.keep_mb=5"], "samples: keep_mb=5 with store=false, which keeps nothing"),
        (["samples.store=false", "samples.keep_mb=null"], "samples: keep_mb=null with store=false"),
        (["trainer.rollout_data_dir=x"], "here it is samples.store; in samples/ of the run's directory"),
    ],
)
def test_settings_that_contradict(overrides: list[str], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_recipe(DEMO, overrides)
    assert line in str(caught.value)
