"""Imports that do only what is needed find what the others find."""

from __future__ import annotations

import gc
import importlib.metadata

import pytest

from engine3d.startup.imports import quick_imports


@pytest.mark.slow
def test_distributions_are_found_as_by_looking_through_all() -> None:
    everything = importlib.metadata.packages_distributions()
    with quick_imports():
        assert not gc.isenabled()
        distributions = importlib.metadata.packages_distributions()
    assert gc.isenabled()
    assert importlib.metadata.packages_distributions() == everything
    assert distributions["torch"] == ["torch"]
    assert distributions["yaml"] == everything["yaml"] == ["PyYAML"]  # a distribution of another name
    assert distributions.get("yaml") == ["PyYAML"] and distributions.get("no_such_package") is None
    assert distributions.keys() == everything.keys()
    with pytest.raises(KeyError):
        distributions["no_such_package"]


def test_what_transformers_reads_of_versions_is_what_is_installed() -> None:
    with quick_imports():
        from transformers.utils import import_utils
    for package in ("torch", "numpy", "tokenizers", "huggingface_hub"):
        assert import_utils._is_package_available(package, return_version=True) == (
            True,
            importlib.metadata.version(package),
        )
