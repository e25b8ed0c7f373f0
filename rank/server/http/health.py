"""Whether requests are answered, for load balancers and people; figures for Prometheus."""

from __future__ import annotations

from typing import Any

from ..version import version
from .routes import Call, Reply, Route


def health(call: Call) -> Reply:
    """200 while requests are answered, else 503. Where keys are needed, a client without one sees the state only."""
    link = call.engine.link
    status = link.state
    models = call.server.models if call.server is not None else None
    if status == "ready" and models is None and call.engine.text is None:
        status = "loading"
    if models is not None and models.switching is not None:
        status = "switching"
    if link.asleep and status in ("loading", "unloaded"):
        status = "sleeping"
    answered = status in ("ready", "switching", "unloaded")  # at once, or once the model is there
    body: dict = {"status": status}
    headers = {}
    if call.known:
        body |= _details(call, status, answered)
    if not answered and (retry_after := link.unavailable().retry_after) is not None:
        headers["Retry-After"] = str(retry_after)
    return Reply(body, 200 if answered else 503, headers)


def _details(call: Call, status: str, answered: bool) -> dict[str, Any]:
    """The rest of the status, for those who have a key."""
    link = call.engine.link
    models = call.server.models if call.server is not None else None
    found: dict[str, Any] = {}
    if status == "loading":
        found["progress"] = {"phase": link.progress.phase, "done": link.progress.done, "total": link.progress.total}
    elif status == "ready":
        found |= {"running": link.stats.running, "waiting": link.stats.waiting}
    elif models is not None and answered:
        found["models"] = models.describe()
    elif link.fatal is not None:
        found["message"] = link.fatal.message
    if call.server is not None and (tools := call.server.tools.health()):
        # Without the reasons, which may name addresses: if no key is needed, anybody may ask here.
        found["tool_servers"] = {name: {"status": one["status"], "tools": one["tools"]} for name, one in tools.items()}
    return found


def metrics(call: Call) -> Reply:
    """Figures in Prometheus' text format."""
    assert call.server is not None
    return Reply(call.server.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def ping(call: Call) -> Reply:
    """Health's status without a body."""
    status = health(call)
    return Reply(b"", status.status, status.headers)


def load(call: Call) -> dict[str, int]:
    """How many requests are being answered."""
    assert call.server is not None
    return {"server_load": len(call.server.active) - 1}  # this one is no load


def versions(call: Call) -> dict[str, str]:
    """Phalanx's version."""
    return {"version": version()}


ROUTES = [
    Route("/health", health, method="GET", also=("/ready", "/v1/health"), needs_key=False),
    Route("/ping", ping, method="GET", needs_key=False, media=()),
    Route("/load", load, method="GET"),
    Route("/version", versions, method="GET"),
    Route("/metrics", metrics, method="GET", media=("text/plain",)),
]
