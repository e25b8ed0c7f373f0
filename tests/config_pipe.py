"""The configuration of the server process and the batch process, by a file descriptor."""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def config_pipe(config: Any) -> Iterator[int]:
    """The descriptor to pass on, closed afterwards."""
    fd = os.memfd_create("config")
    try:
        os.write(fd, json.dumps(config).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
