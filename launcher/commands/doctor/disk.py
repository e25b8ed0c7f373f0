"""How fast a file system reads a model's weights: past the page cache, a bounded number of bytes."""

from __future__ import annotations

import mmap
import os
import threading
import time
from pathlib import Path

import msgspec

from ....rank import filesystems

CHUNK = 8 << 20  # bytes of one read; O_DIRECT wants multiples of a page
MAX_BYTES = 2 << 30  # bytes of all reads
SECONDS = 4.0
READERS = 4  # threads: a parallel file system shows its speed only to several readers


class Speed(msgspec.Struct, frozen=True):
    bytes: int  # read
    seconds: float
    direct: bool  # past the page cache for sure
    kind: str  # of file system
    total: int  # bytes of all weight files

    @property
    def gbps(self) -> float:
        """GB (10^9 bytes) per second."""
        return self.bytes / self.seconds / 1e9


def weights(directory: Path) -> list[Path]:
    """The largest first. directory: may be a file itself."""
    if directory.is_file():
        return [directory]
    named = [path for pattern in ("*.safetensors", "*.gguf", "*.bin") for path in directory.glob(pattern)]
    found = [path for path in named if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_size)


def measure(directory: Path, most: int = MAX_BYTES, seconds: float = SECONDS) -> Speed | None:
    """Read the largest weight file with several threads, each its own part. None where there are no weights."""
    files = weights(directory)
    if not files or not files[0].stat().st_size:
        return None
    size = min(files[0].stat().st_size, most)
    part = max(CHUNK, -(-size // READERS // CHUNK) * CHUNK)
    deadline = time.monotonic() + seconds
    counts = [0] * READERS
    direct = [True] * READERS

    def read(index: int) -> None:
        counts[index], direct[index] = _read(files[0], index * part, min(size, (index + 1) * part), deadline)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(READERS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - start
    total = sum(path.stat().st_size for path in files)
    return Speed(sum(counts), max(taken, 1e-9), all(direct), filesystems.kind(directory), total)


def _read(file: Path, start: int, stop: int, deadline: float) -> tuple[int, bool]:
    """Bytes read from `start` on, and whether it was past the page cache."""
    direct = True
    try:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems have no O_DIRECT
        fd, direct = os.open(file, os.O_RDONLY), False
        os.posix_fadvise(fd, start, max(0, stop - start), os.POSIX_FADV_DONTNEED)
    count, buffer = 0, mmap.mmap(-1, CHUNK)  # of whole pages, as O_DIRECT wants it
    try:
        while start + count < stop and time.monotonic() < deadline:
            try:
                got = os.preadv(fd, [buffer], start + count)
            except OSError:
                if not direct:
                    raise
                os.close(fd)
                fd, direct = os.open(file, os.O_RDONLY), False
                continue
            if not got:
                break
            count += got
            if not direct:
                os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
        buffer.close()
    return count, direct
