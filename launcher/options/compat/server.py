"""Flags of other servers: HTTP, keys and logs."""

from __future__ import annotations

from .flag import note, refuse

FLAGS = {
    **refuse("requests have no time limit; --timeout limits a rank's step", "--request-timeout X, -to X"),
    **note(
        "one server process takes all requests",
        """--api-server-count X, -asc X, --tokenizer-worker-num X, --detokenizer-worker-num X
        --renderer-num-workers X, --tokenizer-pool-size X, --threads-http X, --disable-frontend-multiprocessing""",
    ),
    **refuse(
        "paths have no prefix here: let the proxy strip it", "--root-path X, --fastapi-root-path X, --api-prefix X"
    ),
    **refuse("--host unix:///PATH listens on a unix socket", "--uds X"),
    **refuse("HTTP alone is served", "--grpc-mode, --grpc, --grpc-port X, --smg-grpc-mode"),
    **refuse("clients are known by keys: --api-key-file FILE", "--ssl-ca-certs X, --ssl-cert-reqs X", "0"),
    **refuse("all keys may do the same: --api-key-file FILE", "--admin-api-key X"),
    **refuse("a new certificate is read at the next start", "--enable-ssl-refresh"),
    **refuse("the private key must have no passphrase", "--ssl-keyfile-password X"),
    **refuse("Python's TLS chooses the ciphers", "--ssl-ciphers X"),
    **note(
        "pages of --allowed-origins may use every method that an endpoint has", "--allowed-methods X, --cors-methods X"
    ),
    **note("pages of --allowed-origins may send every header", "--allowed-headers X, --cors-headers X"),
    **refuse("there are no cookies here; a page sends the key in a header", "--allow-credentials, --cors-credentials"),
    **refuse("/docs and /openapi.json are always there", "--disable-fastapi-docs"),
    **note("/docs loads nothing from elsewhere", "--enable-offline-docs"),
    **note("every answer has an X-Request-Id", "--enable-request-id-headers"),
    **note("`usage` says how many tokens were cached", "--enable-prompt-tokens-details, --enable-cache-report"),
    **refuse(
        "a request asks for it: `stream_options`",
        "--enable-force-include-usage, --stream-response-default-include-usage",
    ),
    **refuse("there is no such endpoint", "--enable-tokenizer-info-endpoint, --slots, --props, --slot-save-path X"),
    **refuse("--ui-server serves a page to chat with, and no other files", "--path X"),
    **refuse("--file-store DIR keeps files", "--file-storage-path X"),
    **note("a stream that is silent for long gets comments", "--sse-ping-interval X"),
    **refuse(
        "the model stays loaded; --idle-exit MIN ends an idle job",
        "--enable-sleep-mode, --sleep-idle-seconds X, --enable-memory-saver",
    ),
    **note("idle ranks sleep", "--sleep-on-idle"),
    **note("--log-level debug logs more", "--verbose, -v, --log-verbose, --verbosity X, --log-verbosity X, -lv X"),
    **note("--log-level says what is logged", "--uvicorn-log-level X, --log-level-http X, --log-disable"),
    **note("--log writes a file for each rank", "--log-file X, --log-config-file X"),
    **note("lines of the log have one form", "--log-colors [X], --log-prefix, --log-timestamps, --log-jsonl"),
    **note(
        "requests are logged with --access-log only",
        """--disable-log-requests, --no-enable-log-requests, --disable-uvicorn-access-log, --max-log-len X
        --disable-access-log-for-endpoints X, --uvicorn-access-log-exclude-prefixes X""",
    ),
    **refuse(
        "--access-log logs a line of each request, but none of its text",
        """--enable-log-requests, --log-requests, --log-requests-* X, --enable-log-outputs, --log-prompts-dir X
        --crash-dump-folder X""",
    ),
    **note(
        "figures are at /metrics, and not in the log",
        """--disable-log-stats, --enable-metrics, --metrics, --decode-log-interval X, --show-time-cost, --perf
        --enable-mfu-metrics, --kv-cache-metrics, --kv-cache-metrics-sample X, --cudagraph-metrics
        --enable-per-request-metrics, --enable-logging-iteration-details, --show-hidden-metrics-for-version X
        --enable-metrics-for-all-schedulers, --enable-server-load-tracking, --enable-request-time-stats-logging""",
    ),
    **refuse(
        "traces are not sent; figures are at /metrics",
        "--otlp-traces-endpoint X, --collect-detailed-traces X, --enable-trace, --trace-modules X",
    ),
    **refuse(
        "the page of --ui-server has no settings here",
        "--ui-config X, --webui-config X, --ui-config-file X, --webui-config-file X, --ui-mcp-proxy, --webui-mcp-proxy",
    ),
    **note("heads are limited to 64 KiB", "--h11-* X"),
    **refuse("no profile is written", "--profiler-config X, --enable-layerwise-nvtx-tracing"),
    **refuse("`phalanx doctor` lists them", "--list-devices"),
}
