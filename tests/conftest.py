"""Job files of the servers that tests start do not belong into the user's home."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
