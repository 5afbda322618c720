"""torch's accounts of a full GPU, as torch 2.11 writes them, in short."""

from __future__ import annotations

from engine3d.out_of_memory import in_short

BEGIN = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. "
    "GPU 1 has a total capacity of 79.25 GiB of which 0 bytes is free. "
)
MINE = "Including non-PyTorch memory, this process has 78.00 GiB memory in use. "
END = (
    "Of the allocated memory 77.59 GiB is allocated by PyTorch, and 17.18 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation. See documentation for Memory Management (https://docs.pytorch.org/docs/stable/notes/cuda.html#a)"
)
SHORT = "GPU out of memory: tried to allocate 20.00 MiB with 0 bytes of 79.25 GiB free ("


def test_who_holds_how_much() -> None:
    message = f"during generate: torch.OutOfMemoryError: {BEGIN}{MINE}{END}; log: /tmp/engine.log"
    short = "this process has 78.00 GiB in use, 77.59 GiB in tensors here, 17.18 MiB reserved unused)"
    assert in_short(message) == f"during generate: {SHORT}{short}; log: /tmp/engine.log"


def test_figures_that_are_there_at_times() -> None:
    private = END.replace(
        "PyTorch, and", "PyTorch, with 2.00 GiB allocated in private pools (e.g., CUDA Graphs), and", 1
    )
    short = "77.59 GiB in tensors here, 17.18 MiB reserved unused)"
    assert in_short(f"OutOfMemoryError: {BEGIN}60.00 GiB allowed; {private}") == SHORT + short
    with_neighbour = f"OutOfMemoryError: {BEGIN}Process 7 has 1.00 GiB memory in use. {END.partition(' If')[0]}"
    assert in_short(with_neighbour) == f"{SHORT}process 7 has 1.00 GiB in use, {short}"


def test_an_engine_that_does_not_get_its_memory_again() -> None:
    message = "[torch_memory_saver.cpp] cudaError error: 2 (out of memory)  file=csrc/core.cpp func=resume line=243"
    assert in_short(message).startswith("GPU out of memory: others use memory that the engine released")
    assert "243" not in in_short(f"{message}; log: a") and in_short(f"{message}; log: a").endswith("; log: a")


def test_any_other_text_stays() -> None:
    for text in ("ValueError: no tokens", "CUDA out of memory. Tried to allocate more than 1EB memory.", ""):
        assert in_short(text) == text
