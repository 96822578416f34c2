"""Memory without a name that a rank and its writer share. `/dev/shm` is not used: containers give it 64 MiB."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

from penteract.errors import OutOfMemory
from penteract.units import show_bytes


class SharedMemory:
    """`size` bytes, zeros at first. `fd`: what another process opens them by; they go with the last that has it. Of no
    size: for messages, which are `put` and `get`."""

    def __init__(self, fd: int, size: int = 0) -> None:
        self.fd, self.size = fd, size
        self.map = mmap.mmap(fd, size) if size else None

    @classmethod
    def of_size(cls, name: str, size: int = 0) -> SharedMemory:
        """New memory, all of it taken at once: what is not there is found now, not when it is written. Raises
        OutOfMemory."""
        fd = os.memfd_create(name)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
        except OSError as e:
            os.close(fd)
            raise OutOfMemory("MEMORY", f"no host memory for {name}", found=e.strerror, allowed=show_bytes(size),
                              fix="--checkpoint.asynchronous false, or fewer ranks on a host") from e  # fmt: skip
        return cls(fd, size)

    def put(self, data: bytes) -> None:
        """Write these bytes as all of its content."""
        os.ftruncate(self.fd, len(data))
        left = memoryview(data)
        while left:
            left = left[os.pwrite(self.fd, left, len(data) - len(left)) :]

    def get(self, size: int) -> bytes:
        """Its first `size` bytes."""
        found = b""
        while len(found) < size and (more := os.pread(self.fd, size - len(found), len(found))):
            found += more
        return found

    def close(self) -> None:
        """Give this process's part back. Tensors that lie in it keep it until they are gone."""
        with contextlib.suppress(BufferError):
            if self.map is not None:
                self.map.close()
        os.close(self.fd)


def supported() -> bool:
    """Whether this system has such memory: Linux does."""
    return hasattr(os, "memfd_create")


def as_buffer(memory: SharedMemory) -> Any:
    """The memory for `torch.frombuffer` or `numpy.frombuffer`."""
    return memory.map
