"""Imports of every rank of a test, made once in the server that the ranks are forked from."""

from __future__ import annotations

from engine3d.startup.imports import quick_imports

with quick_imports():  # which also spares the ranks looking through all of it
    import megatron.core.models.mimo.model.base  # noqa: F401
    import pytest  # noqa: F401
    import tabulate  # noqa: F401
    from transformers import AutoModelForCausalLM  # noqa: F401

    import engine3d.checkpoint.hf
    import engine3d.checkpoint.reading.load
    import engine3d.checkpoint.writing.save
    import engine3d.checkpoint.writing.writer
    import engine3d.models.build
    import engine3d.models.files.weights
    import engine3d.reshard.describe.source
    import engine3d.training.engine
    import engine3d.training.megatron.parallel  # noqa: F401
    import tests.support.tiny_families
    import tests.support.tiny_models  # noqa: F401
