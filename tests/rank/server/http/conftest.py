"""Fixtures of tests over HTTP."""

import pytest

from .batching import servers_of_one_store


@pytest.fixture
def store_server(tmp_path, model_dir, tokenizer):
    """Makes servers with the same file store, one after the other."""
    with servers_of_one_store(tmp_path, model_dir, tokenizer) as make:
        yield make
