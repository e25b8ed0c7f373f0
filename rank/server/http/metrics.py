"""Metrics for Prometheus: the server process's counters, and the engine's last statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .... import logs
from ... import protocol
from ..engine_client import EngineClient
from ..session import Session
from ..version import version

if TYPE_CHECKING:
    from ..batch.stored import StoredBatches
    from ..otel import Tracing

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class Metrics(Collector):
    """Nothing here is touched per token."""

    def __init__(self, link: EngineClient, model: str, certificate_end: float | None = None):
        """certificate_end: Unix time; None: the server has no certificate."""
        self.batches: StoredBatches | None = None  # None: without --file-store
        self.tracing: Tracing | None = None  # None: without --otlp-endpoint
        self._certificate_end = certificate_end
        self._registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self._registry}
        Gauge("phalanx_build_info", "Always 1; the labels tell version and model", ["version", "model"], **make).labels(
            version(), model
        ).set(1)
        self._http = Counter("phalanx_http_requests", "HTTP requests answered", ["method", "path", "status"], **make)
        self._finished = Counter("phalanx_requests", "Sequences by how they ended", ["finish_reason"], **make)
        self._prompt = Histogram(
            "phalanx_request_prompt_tokens",
            "Prompt tokens of a request",
            buckets=[1 << i for i in range(0, 20, 2)],
            **make,
        )
        self._output = Histogram(
            "phalanx_request_output_tokens",
            "Generated tokens of a request",
            buckets=[1 << i for i in range(0, 18, 2)],
            **make,
        )
        self._ttft = Histogram(
            "phalanx_time_to_first_token_seconds", "From the request to its first token", buckets=SECONDS, **make
        )
        self._tpot = Histogram(
            "phalanx_time_per_output_token_seconds", "Between tokens after the first", buckets=TOKEN_SECONDS, **make
        )
        self._e2e = Histogram(
            "phalanx_request_seconds", "From the request to its last token or vector", buckets=SECONDS, **make
        )
        self._registry.register(self)
        self._registry.register(_Engine(link))
        self._registry.register(_VllmNames(self._registry, model))

    def http(self, method: str, path: str, status: int) -> None:
        """`path` is the route's or "other": a label for each path or method that somebody tried would have no end."""
        self._http.labels(method if method in METHODS else "other", path, str(status)).inc()

    def session(self, session: Session, gone: bool) -> None:
        """A session is over; `gone`: its client went away first."""
        self.ended(session, "cancelled" if gone else "error")
        if not session.first_token:
            return
        self._ttft.observe(session.first_token - session.start)
        if session.last_token and not gone:
            self._e2e.observe(session.last_token - session.start)
            longest = max(choice.completion_tokens for choice in session.choices)
            if longest > 1:
                self._tpot.observe((session.last_token - session.first_token) / (longest - 1))

    def ended(self, session: Session, broken_off: str = "cancelled") -> None:
        """How a session ended, and its tokens; not in which time, as a request of a batch waits for others."""
        for choice in session.choices:
            self._finished.labels(choice.finish or broken_off).inc()
        self._prompt.observe(session.prompt_tokens)
        self._output.observe(session.completion_tokens)

    def embedding(self, began: float, finish: str, prompts: list[list[int]]) -> None:
        """The sequences of a request for embeddings have ended. They generate nothing, so they have no first token."""
        self._finished.labels(finish).inc(len(prompts))
        self._prompt.observe(sum(map(len, prompts)))
        if finish == "stop":
            self._e2e.observe(time.monotonic() - began)

    def collect(self) -> Iterator[Metric]:
        """Figures of the server process that others count."""
        dropped, left_out = logs.lost()
        sent, lost = (self.tracing.export.sent, self.tracing.export.dropped) if self.tracing else (0, 0)
        unfinished, done = (self.batches.unfinished(), self.batches.done) if self.batches else (0, 0)
        yield CounterMetricFamily(
            "phalanx_log_dropped_bytes", "Bytes of the server process's log that nobody read", value=dropped
        )
        yield CounterMetricFamily(
            "phalanx_log_left_out_lines", "Lines of the server process's log that came too often", value=left_out
        )
        yield GaugeMetricFamily("phalanx_batches_unfinished", "Batches that run or wait for their turn", unfinished)
        yield CounterMetricFamily("phalanx_batch_requests", "Requests of batches that have ended", value=done)
        yield CounterMetricFamily("phalanx_spans_sent", "Spans that the collector of --otlp-endpoint took", value=sent)
        yield CounterMetricFamily("phalanx_spans_dropped", "Spans that it did not take, or not in time", value=lost)
        yield GaugeMetricFamily(
            "phalanx_tls_certificate_end_seconds",
            "Unix time at which the certificate of --tls-cert ends; absent without one",
            self._certificate_end,
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Engine(Collector):
    """The engine's statistics under Prometheus' names."""

    def __init__(self, link: EngineClient):
        self._link = link

    def collect(self) -> Iterator[Metric]:
        s, ready = self._link.stats, self._link.ready
        used = s.blocks_used / s.blocks_total if s.blocks_total else 0.0
        experts = s.experts_resident + s.experts_cpu + s.experts_streamed
        for name, text, value in (
            (
                "ready",
                "1 while requests are answered, also where the model is loaded for them first",
                float(self._link.state in ("ready", "unloaded")),
            ),
            ("ranks", "MPI ranks of the job", ready.ranks if ready else 0),
            ("requests_running", "Sequences in the running batch", s.running),
            ("requests_waiting", "Sequences that wait for a place", s.waiting),
            ("sequences_open", "Sequences that the server process waits for", self._link.open_sequences),
            ("kv_cache_usage_ratio", "Share of the KV cache's blocks that sequences hold", used),
            ("kv_cache_blocks", "Blocks of the KV cache", s.blocks_total),
            ("kv_cache_reusable_blocks", "Free blocks that still hold a prefix", s.blocks_cached),
            ("kv_cache_host_blocks", "Blocks of the KV cache that host memory has room for", s.host_blocks_total),
            ("kv_cache_host_blocks_used", "Blocks of host memory that hold a prefix", s.host_blocks_used),
            ("state_snapshots", "Snapshots of recurrent states that there is room for", s.snapshots_total),
            ("state_snapshots_used", "Snapshots of recurrent states that are kept", s.snapshots_used),
            ("kv_cache_tokens", "Tokens that fit in the KV cache", ready.kv_tokens if ready else 0),
            (
                "experts_hit_ratio",
                "Share of the experts used that were on the device already, on rank 0, since the start",
                s.experts_resident / experts if experts else 0.0,
            ),
        ):
            yield GaugeMetricFamily(f"phalanx_{name}", text, value=value)
        for name, text, value in (
            ("steps", "Steps executed", s.steps),
            ("prompt_tokens", "Prompt tokens, cached ones included", s.prompt_tokens),
            ("prefix_cache_hit_tokens", "Prompt tokens taken from the prefix cache", s.cached_tokens),
            ("generated_tokens", "Tokens generated", s.output_tokens),
            ("preemptions", "Sequences set back for lack of blocks", s.preemptions),
            ("swapped_in", "Preempted sequences that came back from host memory", s.swapped_in),
            ("kv_cache_host_stores", "Blocks copied from the KV cache to host memory", s.host_stores),
            ("kv_cache_host_loads", "Blocks copied from host memory to the KV cache", s.host_loads),
            ("state_snapshot_saves", "Snapshots of recurrent states that were taken", s.snapshot_saves),
            ("state_snapshot_loads", "Sequences that began with a snapshot of states", s.snapshot_loads),
            (
                "experts_resident",
                "Experts used that were on the device already, on rank 0",
                s.experts_resident,
            ),
            ("experts_cpu", "Experts that the CPU computed, on rank 0", s.experts_cpu),
            ("experts_streamed", "Experts copied to the device for a step, on rank 0", s.experts_streamed),
            ("experts_loaded", "Experts that became resident, on rank 0", s.experts_loaded),
            ("prefill_chunks", "Pieces of prompts that did not reach the prompt's end", s.chunks),
            ("aborted", "Sequences aborted", s.aborted),
            ("mm_cache_queries", "Images of sequences", s.images),
            ("mm_cache_hits", "Images whose features were there already, or in the prefix cache", s.image_hits),
            ("tower_seconds", "Seconds in which images' features were computed, on rank 0", s.tower_seconds),
        ):
            yield CounterMetricFamily(f"phalanx_{name}", text, value=value)
        yield from _speculation(s)


def _speculation(stats: protocol.Stats) -> Iterator[Metric]:
    """Guessed tokens by where they came from, under vLLM's names but for the beginning."""
    made = [
        CounterMetricFamily(f"phalanx_spec_decode_{name}", text, labels=labels)
        for name, text, labels in (
            ("num_drafts", "Times that a sequence had guessed tokens verified", ["source"]),
            ("num_draft_tokens", "Guessed tokens that were verified", ["source"]),
            ("num_accepted_tokens", "Guessed tokens that were right", ["source"]),
            ("num_accepted_tokens_per_pos", "The same by position behind the last token", ["source", "position"]),
        )
    ]
    for source, (drafts, tokens, *accepted) in stats.speculation.items():
        for metric, value in zip(made, (drafts, tokens, sum(accepted)), strict=False):
            metric.add_metric([source], value)
        for position, value in enumerate(accepted):
            made[3].add_metric([source, str(position)], value)
    yield from made
    for name, text, seconds in (
        ("seconds", "Seconds of steps that verified guessed tokens", stats.speculation_seconds),
        ("plain_seconds", "Seconds that as many tokens take without guessing", stats.plain_seconds),
    ):
        yield CounterMetricFamily(f"phalanx_spec_decode_{name}", text, value=seconds)


# Dashboards, autoscalers and load generators read vLLM's names.
VLLM_NAMES = {
    "phalanx_requests_running": "num_requests_running",
    "phalanx_requests_waiting": "num_requests_waiting",
    "phalanx_kv_cache_usage_ratio": "kv_cache_usage_perc",
    "phalanx_prompt_tokens": "prompt_tokens",
    "phalanx_generated_tokens": "generation_tokens",
    "phalanx_prefix_cache_hit_tokens": "prefix_cache_hits",
    "phalanx_preemptions": "num_preemptions",
    "phalanx_time_to_first_token_seconds": "time_to_first_token_seconds",
    "phalanx_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "phalanx_request_seconds": "e2e_request_latency_seconds",
    "phalanx_request_prompt_tokens": "request_prompt_tokens",
    "phalanx_request_output_tokens": "request_generation_tokens",
    "phalanx_requests": "request_success",
    "phalanx_mm_cache_queries": "mm_cache_queries",
    "phalanx_mm_cache_hits": "mm_cache_hits",
    "phalanx_spec_decode_num_drafts": "spec_decode_num_drafts",
    "phalanx_spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens",
    "phalanx_spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens",
    "phalanx_spec_decode_num_accepted_tokens_per_pos": "spec_decode_num_accepted_tokens_per_pos",
}


class _VllmNames(Collector):
    """The figures under vLLM's names, with its label for the model."""

    def __init__(self, registry: CollectorRegistry, model: str):
        self._registry = registry
        self._labels = {"model_name": model, "engine": "0"}
        self._collecting = False

    def collect(self) -> Iterator[Metric]:
        if self._collecting:  # the registry asks this collector too
            return
        self._collecting = True
        try:
            for metric in self._registry.collect():
                if metric.name in VLLM_NAMES:
                    yield self._renamed(metric, "vllm:" + VLLM_NAMES[metric.name])
        finally:
            self._collecting = False

    def _renamed(self, metric: Metric, name: str) -> Metric:
        renamed = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {("finished_reason" if key == "finish_reason" else key): one for key, one in sample.labels.items()}
            suffix = sample.name.removeprefix(metric.name)
            if suffix != "_created":
                renamed.add_sample(name + suffix, {**self._labels, **labels}, sample.value)
        return renamed
