"""Pins of a lock file to install into an image that already has its own GPU stack (Dockerfile).

    python launch/image_requirements.py requirements.lock > missing.txt

A package of the GPU stack is never installed over the image's: torch and what is compiled against it, CUDA's libraries,
Triton. Any other package is listed unless the image has exactly the pinned version. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

# Kept from the image. What the image lacks of these is compiled for the registry's torch, or is in the image under the
# system's package manager (CUDA, cuDNN, NCCL), so it is left out either way.
GPU_STACK = re.compile(
    r"torch|torchvision|torchaudio|torchcodec|triton|apex|transformer-engine.*|cuda-toolkit"
    r"|nvidia-(?!ml-py$|cudnn-frontend$|mathdx$|cutlass-dsl).*"
)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(lock: str, installed: dict[str, str]) -> list[str]:
    """The pins of a lock, with their hashes, to install where `installed` (canonical name -> version) is there."""
    pins = []
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n?", "", lock)).splitlines()
    for line in lines:
        pin, *hashes = line.split("#")[0].split(";")[0].split()
        name, _, version = pin.partition("==")
        if not GPU_STACK.fullmatch(canonical(name)) and installed.get(canonical(name)) != version:
            pins.append(" ".join([pin, *hashes]))
    return pins


def main() -> None:
    installed = {
        canonical(distribution.name): distribution.version for distribution in importlib.metadata.distributions()
    }
    print("\n".join(missing(Path(sys.argv[1]).read_text(), installed)))


if __name__ == "__main__":
    main()
