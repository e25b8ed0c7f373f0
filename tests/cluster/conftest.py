"""Rehearsals of what a cluster does to a job. All are long."""

import subprocess

import pytest

from .hosts import Hosts, missing
from .slurm import Slurm
from .slurm import missing as slurm_missing


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two hosts, node0 and node1, with two slots each."""
    if reason := missing():
        pytest.skip(reason)
    try:
        made = Hosts(tmp_path_factory.mktemp("hosts"))
    except RuntimeError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")
    with made:
        yield made


@pytest.fixture(scope="module")
def slurm(hosts, tmp_path_factory):
    """A Slurm of both hosts, of one module."""
    if reason := slurm_missing():
        pytest.skip(reason)
    try:
        running = Slurm(hosts, tmp_path_factory.mktemp("slurm"))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"Slurm cannot start here: {error}")
    with running:
        yield running
