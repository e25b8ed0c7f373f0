"""Servers with a file store, and clients that send them batches."""

import contextlib
import json
import time

from ....late import Late
from ..conftest import LiveServer

openai = Late("openai")


@contextlib.contextmanager
def servers_of_one_store(tmp_path, model_dir, tokenizer):
    """Makes servers with the same directory, one after the other; they are stopped at the end."""
    servers = []

    def make(connect=True, **options):
        scheduler = options.pop("scheduler", {})
        place = tmp_path / f"server{len(servers)}"
        place.mkdir()
        options = {"served_model_name": "tiny", "file_store": str(tmp_path / "store"), **options}
        servers.append(LiveServer(place, model_dir, tokenizer, connect, scheduler, **options))
        fresh_server = servers[-1]
        fresh_server.call(fresh_server.state.batches.start)
        return fresh_server

    yield make
    for one in servers:
        leave(one)


def leave(server):
    """Ends like a server that is stopped: what it has begun stays on the disk."""
    if server.state.batches is not None:
        server.call(server.state.batches.close)
        server.state.batches = None
        server.stop()


def client_of(fresh_server, key="x"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{fresh_server.port}/v1", api_key=key, max_retries=0)


def line(name, body=None, url="/v1/chat/completions", **more):
    body = body or {"messages": [{"role": "user", "content": f"hello {name}"}], "max_tokens": 8}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body, **more})


def put(client, *lines, name="in.jsonl"):
    return client.files.create(file=(name, "\n".join(lines).encode()), purpose="batch")


def begin(client, *lines, endpoint="/v1/chat/completions", **more):
    more = {"completion_window": "24h", **more}
    return client.batches.create(input_file_id=put(client, *lines).id, endpoint=endpoint, **more)


def until(client, batch, *statuses):
    deadline = time.monotonic() + 120
    while batch.status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def read(client, id):
    return [json.loads(one) for one in client.files.content(id).text.splitlines()]
