"""Rehearsals of what a cluster does to a job. All are long."""

import pytest

from .hosts import Hosts, missing


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
