"""A batch job on one loop with a scheduler that answers known tokens: started as often as a test wants."""

import asyncio
import json
import time

from phalanx.rank.server.batch.config import BatchConfig
from phalanx.rank.server.batch.journal import Journal
from phalanx.rank.server.batch.run import BatchRun
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.engine_client import EngineClient
from phalanx.rank.server.text_engine import TextEngine

from ..conftest import FakeScheduler


class Stage:
    """`start` runs a job until its end, with `during(stage)` beside it."""

    def __init__(self, place, model_dir, tokenizer):
        self.place = place
        self.model_dir = model_dir
        self.end_token = tokenizer.token_to_id("<|end|>")
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        self.scheduler_has = {}  # attributes of every scheduler
        self.asked = []  # seeds of all requests that any scheduler has had: the tests' names for them
        self.scheduler = self.batch = self.link = None

    def input(self, count, *more, **body):
        lines = [
            {"custom_id": f"r{i}", "url": "/v1/completions",
             "body": {"prompt": f"hello {i}", "max_tokens": 20, "seed": i, **body}}
            for i in range(count)
        ]  # fmt: skip
        texts = [json.dumps(line) for line in lines] + list(more)
        (self.place / "in.jsonl").write_text("\n".join(texts) + "\n")

    def start(self, during=None, connect=True, restarts=False, **options):
        return asyncio.run(self._start(during, connect, restarts, options))

    async def _start(self, during, connect, restarts, options):
        server = ServerConfig(
            model_dir=str(self.model_dir), link=str(self.place / "link"), listen_fd=-1, restarts_expected=restarts,
            served_model_name="tiny", queue_size=1 << 30,
        )  # fmt: skip
        given = {
            "input": str(self.place / "in.jsonl"),
            "output": str(self.place / "out.jsonl"),
            "errors": str(self.place / "errors.jsonl"),
            "summary": str(self.place / "summary.json"),
        }
        if "seconds" in options:
            options |= {"end_time": time.time() + options.pop("seconds"), "reserve": 0.1}
        config = BatchConfig(server, **given | options)
        journal = Journal(config.journal, config.input, {"the model": "tiny"}, config.overwrite)
        self.link = EngineClient(server.link, restarts)
        engine = TextEngine(self.link, server)
        self.batch = BatchRun(config, journal, self.link, engine)
        await self.link.listen()
        self.scheduler = None
        if connect:
            await self.connect()
        beside = asyncio.ensure_future(during(self)) if during else None
        try:
            async with asyncio.timeout(20):
                code = await self.batch.run()
                if beside is not None:
                    await beside
                await self.batch.leave(code)
        finally:
            self.link.close()
            if self.scheduler is not None:
                self.asked += [request.sampling.seed for request in self.scheduler.requests]
                self.scheduler.close()
            engine.close()
            journal.close()
        return code

    async def connect(self):
        if self.scheduler is not None:
            self.asked += [request.sampling.seed for request in self.scheduler.requests]
            self.scheduler.close()
        self.scheduler = FakeScheduler(self.link.path, self.encode, self.end_token)
        for name, value in self.scheduler_has.items():
            setattr(self.scheduler, name, value)
        await self.scheduler.connect()

    async def until(self, condition, seconds=5):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            await asyncio.sleep(0.005)

    def read(self, name="out.jsonl"):
        path = self.place / name
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else None

    def ids(self):
        return [one["custom_id"] for one in self.read()]

    @property
    def summary(self):
        return json.loads((self.place / "summary.json").read_text())

    def left(self):
        return sorted(path.name for path in self.place.iterdir() if path.name not in ("in.jsonl", "summary.json"))
