"""Puts a load on a server: requests that stream, each on a connection of its own, and what they came to."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from . import report, workload
from .client import Answer, Client, Failure
from .report import Result
from .workload import Job, Load, Scale

ALONE = 100  # events of the stream beside the load that come before it
FIRST_WAIT = 0.25  # seconds before the first retry, then twice as long each time, unless the server says


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Every stream is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def measure(
    load: Load, client: Client, model: str, scale: Scale, count: int, warmup: int = 0, beside: int = 0
) -> tuple[list[Result], dict[str, Any]]:
    """`count` requests, and the figures of the run. Raises Failure where the warm-up fails.

    beside: tokens of one more stream, which begins before them and is given up after them; its gaps are apart.
    """
    if warmup:
        before, _, _ = await send(load, client, workload.jobs(load, model, scale, warmup, "warm-up"))
        if error := next((r.error for r in before if r.error), None):
            raise Failure(f"the warm-up failed: {error}")
    made = workload.jobs(load, model, scale, count)  # before the stream, which images being encoded would hold up
    async with contextlib.AsyncExitStack() as stack:
        stream = None
        if beside:
            stream = await stack.enter_async_context(_beside(load, client, model, scale, beside))
        began = time.perf_counter()
        results, wall, cpu = await send(load, client, made)
    figures = report.summary(results, wall, cpu)
    return results, figures if stream is None else figures | report.beside(stream, began, began + wall)


@contextlib.asynccontextmanager
async def _beside(load: Load, client: Client, model: str, scale: Scale, tokens: int) -> AsyncIterator[Answer]:
    """A stream of text that has decoded alone for ALONE events. Raises Failure where it ends before."""
    text = replace(load, image=0, history_turns=0, output_lens=[tokens], ignore_eos=True)
    (job,) = workload.jobs(text, model, scale, 1, "beside")
    answer = Answer()
    task = asyncio.create_task(client.call("POST", workload.path(load), job.body, answer))
    try:
        while len(answer.times) < ALONE:
            if task.done():
                await task
                raise Failure(f"the stream beside the load had {len(answer.times)} events: ask for more than {ALONE}")
            await asyncio.sleep(0.001)
        yield answer
    finally:
        task.cancel()
        await asyncio.wait([task])


async def _one(load: Load, client: Client, job: Job, began: float) -> Result:
    """A request with its retries; never raises for what the server does."""
    result = Result(job)
    sent = time.perf_counter()
    result.sent = sent - began
    wait = FIRST_WAIT
    while True:
        answer = Answer(keep_text=load.keep_text)
        try:
            await client.call("POST", workload.path(load), job.body, answer)
            _fill(result, answer, sent)
            return result
        except Failure as failure:
            if not failure.retry or result.retries == load.max_retries:
                result.error = str(failure)
                return result
            result.retries += 1
            await asyncio.sleep(wait if failure.after is None else failure.after)
            wait *= 2


def _fill(result: Result, answer: Answer, sent: float) -> None:
    usage, times = answer.usage, answer.times
    assert usage is not None
    # Tokens may have no text of their own, such as the one that ends an answer: then its last event is all there is.
    first = times[0] if times else answer.ended
    result.prompt_tokens, result.output_tokens = usage.prompt_tokens, usage.completion_tokens
    result.cached_tokens = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    if (details := usage.completion_tokens_details) is not None:
        result.guessed_right = details.accepted_prediction_tokens or 0
        result.guessed_wrong = details.rejected_prediction_tokens or 0
    result.ttft, result.e2e, result.finish = first - sent, answer.ended - sent, answer.finish
    if result.output_tokens > 1:
        result.tpot = (answer.ended - first) / (result.output_tokens - 1)
    result.gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    result.text = "".join(answer.text or ())


async def send(load: Load, client: Client, jobs: list[Job]) -> tuple[list[Result], float, float]:
    """Send all when due; the results, the seconds that it took, and those of this process's processor.

    Ctrl-C ends the run, not the report: what is still under way has failed.
    """
    slots = asyncio.Semaphore(load.concurrency or len(jobs))
    began, cpu = time.perf_counter(), time.process_time()

    async def one(job: Job) -> Result:
        await asyncio.sleep(max(job.due - (time.perf_counter() - began), 0))
        async with slots:
            return await _one(load, client, job, began)

    tasks = [asyncio.create_task(one(job)) for job in jobs]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    results = [
        Result(job, error="interrupted") if task.cancelled() else task.result()
        for job, task in zip(jobs, tasks, strict=True)
    ]
    return results, wall, cpu
