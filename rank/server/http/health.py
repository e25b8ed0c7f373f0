"""Whether requests are answered, for load balancers and people; figures for Prometheus."""

from __future__ import annotations

from ..version import version
from .routes import Call, Reply, Route


def health(call: Call) -> Reply:
    """200 while requests are answered, else 503 with what the server is doing."""
    link = call.engine.link
    status = link.state
    models = call.server.models if call.server is not None else None
    if status == "ready" and models is None and call.engine.text is None:
        status = "loading"
    if models is not None and models.switching is not None:
        status = "switching"
    answered = status in ("ready", "switching", "unloaded")  # at once, or once the model is there
    body: dict = {"status": status}
    headers = {}
    if status == "loading":
        body["progress"] = {"phase": link.progress.phase, "done": link.progress.done, "total": link.progress.total}
    elif status == "ready":
        body |= {"running": link.stats.running, "waiting": link.stats.waiting}
    elif models is not None and answered:
        body["models"] = models.describe()
    elif link.fatal is not None:
        body["message"] = link.fatal.message
    if call.server is not None and (tools := call.server.tools.health()):
        # Anybody may ask; why one is not there may name its address, so /v1/mcp/tools says it to those with a key.
        body["tool_servers"] = {name: {"status": one["status"], "tools": one["tools"]} for name, one in tools.items()}
    if not answered and (retry_after := link.unavailable().retry_after) is not None:
        headers["Retry-After"] = str(retry_after)
    return Reply(body, 200 if answered else 503, headers)


def metrics(call: Call) -> Reply:
    """Figures in Prometheus' text format."""
    assert call.server is not None
    return Reply(call.server.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def ping(call: Call) -> Reply:
    """The same status without a body."""
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
    Route("/load", load, method="GET", needs_key=False),
    Route("/version", versions, method="GET", needs_key=False),
    Route("/metrics", metrics, method="GET", needs_key=False, media=("text/plain",)),
]
