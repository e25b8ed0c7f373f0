"""Files that clients upload, for batches."""

from __future__ import annotations

from typing import Any

from ..api_error import ApiError
from ..batch.stored import StoredBatches
from ..blocking import on_disk
from ..file_store import OFF, FileStore, StoredFile, elsewhere
from .paging import page
from .routes import Call, Download, Route
from .upload import Upload


def store_of(call: Call) -> FileStore:
    """Raises ApiError 404 where there is none."""
    assert call.server is not None
    if call.server.batches is None or call.server.batches.files.closing:
        raise elsewhere() if call.server.config.file_store else ApiError(404, OFF, code="files_off")
    return call.server.batches.files


def batches_of(call: Call) -> StoredBatches:
    """Raises ApiError 404 where there are none."""
    store_of(call)
    assert call.server is not None and call.server.batches is not None
    return call.server.batches


def receive(call: Call, content_type: str) -> Upload:
    return Upload(content_type, store_of(call), call.owner)


def create(call: Call) -> dict[str, Any]:
    """A file of up to 512 MiB is kept: a multipart form with `purpose` (`batch`) and `file`."""
    file: StoredFile = call.request
    return file.body()


async def files(call: Call) -> dict[str, Any]:
    """The files, the last first (`order`, `limit`, `after`, `purpose`)."""
    store, purpose = store_of(call), call.query.get("purpose")
    kept = [one for one in store.all(call.owner) if purpose in (None, one.purpose)]
    return page(await on_disk(lambda: [one.body(store.wrong(one)) for one in kept]), call.query, 10_000, 10_000)


async def retrieve(call: Call) -> dict[str, Any]:
    """Answers with a file's metadata."""
    store = store_of(call)
    file = store.get(call.args["file_id"], call.owner)
    return file.body(await on_disk(store.wrong, file))


async def content(call: Call) -> Download:
    """A file's bytes."""
    store = store_of(call)
    file = store.get(call.args["file_id"], call.owner)
    await on_disk(store.check, file)
    return Download(store.path(file), file)


async def delete(call: Call) -> dict[str, Any]:
    """Remove a file."""
    store = store_of(call)
    file = store.get(call.args["file_id"], call.owner)
    batches_of(call).check_unused(file)
    store.forget(file)  # at once, so that nobody begins a batch with it
    await on_disk(store.drop, file)
    return {"id": file.id, "object": "file", "deleted": True}


ONE = "/v1/files/{file_id}"
ROUTES = [
    Route("/v1/files", create, receive=receive),
    Route("/v1/files", files, method="GET"),
    Route(ONE, retrieve, method="GET"),
    Route(ONE, delete, method="DELETE"),
    Route(f"{ONE}/content", content, method="GET", media=("application/octet-stream",)),
]
