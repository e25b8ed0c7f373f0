"""Many requests in one file, answered when the server has nothing better to do."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar

from .. import unsupported
from ..api_error import bad
from ..decoding import Body, show
from ..fields import Metadata, doc
from .files import batches_of
from .paging import page
from .routes import Call, Route, batchable

WINDOW = re.compile(r"([1-9]\d{0,2})([hd])")
HOUR = {"h": 1, "d": 24}
LONGEST = 30 * 24  # hours
REFUSED = {"output_expires_after": unsupported.Field("files stay until they are deleted, leave it out")}


class BatchRequest(Body, kw_only=True):
    """POST /v1/batches."""

    refused: ClassVar[dict[str, unsupported.Field]] = REFUSED

    input_file_id: Annotated[str, doc("an uploaded file of request lines ([docs/batch.md](batch.md))")]
    endpoint: Annotated[str, doc("which one all lines are for")]
    completion_window: Annotated[str, doc(
        "`24h`, or another time from `1h` to `30d`: what is not answered then is given up"
    )]  # fmt: skip
    metadata: Annotated[Metadata | None, doc("comes back in the batch")] = None

    @property
    def hours(self) -> int:
        """The window; 0 for one that is none."""
        found = WINDOW.fullmatch(self.completion_window)
        hours = int(found[1]) * HOUR[found[2]] if found else 0
        return hours if hours <= LONGEST else 0

    def check(self) -> None:
        if self.endpoint not in batchable():
            raise bad("endpoint", f"endpoint is {show(self.endpoint)}: expected {' or '.join(batchable())}")
        if not self.hours:
            raise bad(
                "completion_window",
                f"completion_window is {show(self.completion_window)}: expected 24h, or another time from 1h to 30d",
            )


async def create(call: Call) -> dict[str, Any]:
    """The requests of a file are answered in idle time; live requests go first."""
    request: BatchRequest = call.request
    batch = await batches_of(call).create(
        call.owner, request.input_file_id, request.endpoint, request.completion_window, request.hours, request.metadata
    )
    return batch.body()


def batches(call: Call) -> dict[str, Any]:
    """The batches, the last first (`order`, `limit`, `after`)."""
    return page([one.body() for one in batches_of(call).all(call.owner)], call.query)


def retrieve(call: Call) -> dict[str, Any]:
    """A batch as it is now."""
    return batches_of(call).get(call.args["batch_id"], call.owner).body()


async def cancel(call: Call) -> dict[str, Any]:
    """Stop a batch; what is answered already is in its output file."""
    return (await batches_of(call).cancel(call.args["batch_id"], call.owner)).body()


ROUTES = [
    Route("/v1/batches", create, BatchRequest),
    Route("/v1/batches", batches, method="GET"),
    Route("/v1/batches/{batch_id}", retrieve, method="GET"),
    Route("/v1/batches/{batch_id}/cancel", cancel),
]
