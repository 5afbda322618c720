"""Memory outside the device for offloaded models."""

from __future__ import annotations

import mmap
import os
import tempfile

from engine3d.startup.lazy_imports import torch


class OffloadMemory:
    """Host memory of a GPU's process, page-locked.

    Attributes:
        tensor: (nbytes,) uint8.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def rest(self) -> None:
        """Announce that nobody reads the copies for a while."""


class FileMemory(OffloadMemory):
    """An unnamed file in the temporary directory, because on a CPU host memory is the device's.

    Args:
        nbytes: at least 1.

    Raises:
        RuntimeError: the file system is full; names the directory.
    """

    def __init__(self, nbytes: int) -> None:
        with tempfile.TemporaryFile() as file:
            try:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise RuntimeError(f"{tempfile.gettempdir()}: {error.strerror}") from error
            self._pages = mmap.mmap(file.fileno(), nbytes)
        super().__init__(torch.frombuffer(self._pages, dtype=torch.uint8))

    def rest(self) -> None:
        """Take the file's pages out of this process's memory; their contents stay in the file."""
        self._pages.madvise(mmap.MADV_DONTNEED)
