"""A load on a running server, and what it measures: `phalanx bench` and benchmarks/serve.py."""
