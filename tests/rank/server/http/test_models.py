"""The list of models in the shapes of both APIs, by their own clients."""

import pytest

from ....late import Late

anthropic = Late("anthropic")
openai = Late("openai")

pytestmark = pytest.mark.timeout(30)
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def server(make_server):
    return make_server(served_model_name="tiny,other")


@pytest.fixture
def client(server):
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="x", max_retries=0) as client:
        yield client


def test_anthropic_s_client(server, client):
    names = [one["id"] for one in server.request("GET", "/v1/models").body["data"]]
    assert len(names) > 1
    assert [one.id for one in client.models.list(limit=1)] == names  # page after page
    page = client.models.list(before_id=names[-1])
    assert [one.id for one in page.data] == names[:-1] and (page.first_id, page.has_more) == (names[0], False)
    one = client.models.retrieve(names[0])
    assert (one.type, one.display_name, one.lifecycle, one.max_input_tokens) == ("model", names[0], "active", 512)
    assert abs(one.created_at.timestamp() - server.state.started) < 1


def test_openai_s_client_gets_its_own(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="x", max_retries=0) as client:
        assert all(one.object == "model" for one in client.models.list())


def test_errors_have_the_client_s_shape(server, client):
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("none")
    assert refused.value.body["error"]["type"] == "not_found_error"
    for query in ("limit=0", "after_id=none"):
        answer = server.request("GET", f"/v1/models?{query}", headers=VERSION)
        assert answer.status == 400 and answer.body["error"]["type"] == "invalid_request_error"
    assert server.request("GET", "/v1/models/none").body["error"]["code"] == "model_not_found"


def test_a_model_without_a_template_says_so(server, monkeypatch):
    """Clients tell a base model by it; one with a template has no such field."""
    (entry, *_) = server.request("GET", "/v1/models").body["data"]
    assert "chat_template" not in entry
    monkeypatch.setattr(server.engine.text, "family", "Gemma")
    (entry, *_) = server.request("GET", "/v1/models").body["data"]
    assert entry["chat_template"] is False
