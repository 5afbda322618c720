"""Triton's kernels compiled for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compiled_for_hopper(
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    whole_words: Sequence[str],
    warps: int = 4,
) -> str:
    """PTX of a kernel for compute capability 9.0, in a process where Triton does not interpret.

    Args:
        kernel: of triton.jit.
        arguments: the types of those that are no constants, as Triton writes them ("*bf16", "i32").
        constants: the values of the others; a call's integers that are 1 are constants too.
        whole_words: arguments that are multiples of 16, as pointers to tensors are.
        warps: of a program.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.arg_names
    types = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in whole_words},
    )
    text: str = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm["ptx"]
    return text
