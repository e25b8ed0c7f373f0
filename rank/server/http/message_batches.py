"""Anthropic's message batches: requests for /v1/messages that are answered in idle time, on the store of batches.

https://docs.anthropic.com/en/api/creating-message-batches
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..anthropic_format import error_body, rfc3339
from ..api_error import ApiError, bad
from ..batch.stored import StoredBatch
from ..batch.stored_run import MAX_REQUESTS
from ..blocking import on_disk
from ..decoding import Body, show
from ..fields import doc
from ..file_store import FileStore, StoredFile, cannot_write
from ..json_line import encode
from .files import batches_of, store_of
from .paging import anthropic_page
from .routes import Call, Lines, Route

PATH = "/v1/messages"
KIND = "message_batch"
WINDOW, HOURS = "24h", 24
PIECE = 1 << 20  # bytes of results that are read together
RESULTS = {"batch_expired": "expired", "batch_cancelled": "canceled"}  # by the code of a line that has no answer


class BatchedMessage(msgspec.Struct):
    """A request of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=64)]
    params: dict[str, Any]

    def line(self) -> bytes:
        """The request as a line of a batch file."""
        return msgspec.json.encode({"custom_id": self.custom_id, "method": "POST", "url": PATH, "body": self.params})


class MessageBatchRequest(Body, kw_only=True):
    """POST /v1/messages/batches."""

    requests: Annotated[Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)], doc(
        "objects with a `custom_id` and `params`, a request for /v1/messages"
    )]  # fmt: skip

    def check(self) -> None:
        (id, count), *_ = Counter(one.custom_id for one in self.requests).most_common(1)
        if count > 1:
            raise bad("requests", f"requests has the custom_id {show(id)} more than once")


async def create(call: Call) -> dict[str, Any]:
    """Requests for /v1/messages that are answered in idle time; live requests go first."""
    request: MessageBatchRequest = call.request
    store = store_of(call)
    file = await on_disk(_keep, store, call.owner, request.requests)
    call.release()
    try:
        made = await batches_of(call).create(
            call.owner, file.id, PATH, WINDOW, HOURS, None, kind=KIND, total=len(request.requests)
        )
    except BaseException:
        await on_disk(store.drop, file)
        raise
    return _shown(made)


def _keep(store: FileStore, owner: str, requests: Iterable[BatchedMessage]) -> StoredFile:
    """The file of a batch's requests, which counts among its owner's. In a thread. Raises ApiError."""
    file = store.new("message_batch.jsonl", "batch", owner)
    try:
        data = b"\n".join(one.line() for one in requests)
        store.grow(file, len(data))
        with open(store.path(file), "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            out.write(data)
        store.add(file)
    except BaseException as error:
        store.drop(file)
        raise cannot_write("batch", error) if isinstance(error, OSError) else error from None
    return file


def _shown(batch: StoredBatch) -> dict[str, Any]:
    """Anthropic's message batch. What came of requests is counted once all are over, as there."""
    over, left_out = batch.over, {"expired": "expired", "cancelled": "canceled"}.get(batch.status, "errored")
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if over:
        counts["succeeded"] = batch.completed
        counts[left_out] += batch.given_up
        counts["errored"] += batch.total - batch.completed - batch.given_up
    else:
        counts["processing"] = batch.total
    ended = getattr(batch, f"{batch.status}_at") if over else None
    has_results = batch.output_file_id or batch.error_file_id
    return {
        "id": batch.id,
        "type": KIND,
        "processing_status": "ended" if over else "canceling" if batch.status == "cancelling" else "in_progress",
        "request_counts": counts,
        "created_at": rfc3339(batch.created_at),
        "expires_at": rfc3339(batch.expires_at),
        "ended_at": rfc3339(ended) if ended is not None else None,
        "cancel_initiated_at": rfc3339(batch.cancelling_at) if batch.cancelling_at is not None else None,
        "archived_at": None,
        "results_url": f"{PATH}/batches/{batch.id}/results" if over and has_results else None,
    }


def _found(call: Call) -> StoredBatch:
    return batches_of(call).get(call.args["message_batch_id"], call.owner, KIND)


def batches(call: Call) -> dict[str, Any]:
    """The message batches, the last first (`limit`, `after_id`, `before_id`)."""
    return anthropic_page([_shown(one) for one in reversed(batches_of(call).all(call.owner, KIND))], call.query)


def retrieve(call: Call) -> dict[str, Any]:
    """A message batch as it is now."""
    return _shown(_found(call))


async def cancel(call: Call) -> dict[str, Any]:
    """Stop a message batch; what is answered already is in its results."""
    return _shown(await batches_of(call).cancel(_found(call).id, call.owner, KIND))


async def delete(call: Call) -> dict[str, Any]:
    """Remove a message batch that is over, with its requests and results."""
    batch = _found(call)
    await batches_of(call).delete(batch)
    store = store_of(call)
    for id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        with contextlib.suppress(ApiError):  # removed as a file already
            if id is not None:
                await on_disk(store.drop, store.get(id, call.owner))
    return {"id": batch.id, "type": "message_batch_deleted"}


async def results(call: Call) -> Lines:
    """The results of a message batch that is over, a JSON object in each line."""
    batch, store = _found(call), store_of(call)
    if _shown(batch)["results_url"] is None:
        why = "it has none" if batch.over else "it is not over yet"
        raise ApiError(404, f"there are no results of the message batch {batch.id}: {why}", code="no_results")
    files = [store.get(id, call.owner) for id in (batch.output_file_id, batch.error_file_id) if id is not None]
    for file in files:
        await on_disk(store.check_whole, file)
    return Lines(_lines([store.path(file) for file in files]))


async def _lines(paths: list[Path]) -> AsyncIterator[bytes]:
    for path in paths:
        at = 0
        while True:
            data, at = await on_disk(_piece, path, at)
            if not data:
                break
            yield data


def _piece(path: Path, at: int) -> tuple[bytes, int]:
    """Results from some lines of a batch's file, and where the next ones begin. In a thread."""
    with open(path, "rb") as file:
        file.seek(at)
        lines = file.readlines(PIECE)
        return b"".join(encode(_result(msgspec.json.decode(one))) + b"\n" for one in lines), file.tell()


def _result(line: dict[str, Any]) -> dict[str, Any]:
    error, response = line["error"], line["response"]
    if error is None:
        result = {"type": "succeeded", "message": response["body"]}
    elif error["code"] in RESULTS:
        result = {"type": RESULTS[error["code"]]}
    else:
        status = response["status_code"] if response is not None else 400
        told = error_body(ApiError(status, error["message"]))
        result = {"type": "errored", "error": {**told, "request_id": None}}
    return {"custom_id": line["custom_id"], "result": result}


ALL = f"{PATH}/batches"
ONE = f"{ALL}/{{message_batch_id}}"
ROUTES = [
    Route(ALL, create, MessageBatchRequest, error=error_body),
    Route(ALL, batches, method="GET", error=error_body),
    Route(ONE, retrieve, method="GET", error=error_body),
    Route(ONE, delete, method="DELETE", error=error_body),
    Route(f"{ONE}/cancel", cancel, error=error_body),
    Route(f"{ONE}/results", results, method="GET", media=("application/x-jsonl",), error=error_body),
]
