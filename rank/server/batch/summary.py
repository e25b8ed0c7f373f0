"""The summary at the end of a batch job, as text and as JSON."""

from __future__ import annotations

import msgspec

from ..durable import atomically
from .progress import Counts, duration


class Totals(msgspec.Struct):
    requests: int
    answered: int
    failed: int
    prompt_tokens: int
    output_tokens: int


class Summary(msgspec.Struct):
    """`run` is what this start did, `total` what is done altogether. Rates and seconds are of this start."""

    state: str  # "complete", "unfinished" (to be gone on with), or "stopped" by what `reason` says
    exit_code: int
    reason: str  # why it ended
    input: str
    output: str
    errors: str  # "" where there are none
    model: str
    ranks: int
    run: Totals
    total: Totals
    seconds: float
    loading_seconds: float
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    energy_joules: float | None = None  # of the GPUs on rank 0's host; None where NVML does not tell
    energy_gpus: int = 0
    joules_per_output_token: float | None = None  # None also where ranks on other hosts are not measured


def totals(counts: Counts) -> Totals:
    return Totals(counts.done, counts.answered, counts.failed, counts.prompt_tokens, counts.output_tokens)


def rate(count: float, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def text(summary: Summary, printed: bool = False) -> str:
    """A few lines for people. printed: they have seen the reason."""
    run, total = summary.run, summary.total
    lines = [f"{summary.state} (exit code {summary.exit_code})" if printed else f"{summary.state}: {summary.reason}"]
    where = f" ({summary.errors})" if summary.errors else ""
    failed = f", {total.failed} failed{where}" if total.failed else ", none failed"
    lines.append(f"requests: {total.requests} done{failed}")
    if total.requests != run.requests:
        lines.append(f"          {run.requests} by this start, {total.requests - run.requests} before")
    lines.append(
        f"tokens:   {run.prompt_tokens} of prompts, {run.output_tokens} of output, "
        f"{summary.output_tokens_per_second:.1f} output tokens/s"
    )
    lines.append(f"time:     {duration(summary.seconds)}, {duration(summary.loading_seconds)} of it loading")
    if summary.energy_joules is not None:
        each = summary.joules_per_output_token
        per_token = f", {each:.3g} J per output token" if each is not None else ""
        gpus = "1 GPU" if summary.energy_gpus == 1 else f"{summary.energy_gpus} GPUs"
        lines.append(f"energy:   {summary.energy_joules:.0f} J of {gpus}{per_token}")
    return "\n         ".join(lines)


def save(summary: Summary, path: str) -> None:
    with atomically(path) as file:
        file.write(msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
