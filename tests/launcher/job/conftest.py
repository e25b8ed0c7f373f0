"""What the tests of jobs share."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def short_directory():
    """For a Unix socket, whose whole path has at most 107 bytes: pytest's own directories are long."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as directory:
        yield Path(directory)
