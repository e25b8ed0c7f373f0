"""/health for load balancers and people, /metrics for Prometheus."""

from __future__ import annotations

from .handler import Handler


class Health(Handler):
    """200 while requests are answered, else 503 with what the server is doing."""

    needs_key = False

    def get(self) -> None:
        link = self.state.link
        status = link.state
        if status == "ready" and self.state.sessions.text is None:
            status = "loading"
        body: dict = {"status": status}
        if status == "loading":
            body["progress"] = {"phase": link.progress.phase, "done": link.progress.done, "total": link.progress.total}
        elif status == "ready":
            body |= {"running": link.stats.running, "waiting": link.stats.waiting}
        elif link.fatal is not None:
            body["message"] = link.fatal.message
        if status != "ready":
            retry_after = link.unavailable().retry_after
            if retry_after is not None:
                self.set_header("Retry-After", str(retry_after))
        self.reply(body, 200 if status == "ready" else 503)

    head = get


class MetricsPage(Handler):
    """Figures in Prometheus' text format."""

    needs_key = False

    def get(self) -> None:
        self.set_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.finish(self.state.metrics.text())
