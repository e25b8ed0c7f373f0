"""A server in a thread, with a scheduler that answers known tokens, and a model directory with a small tokenizer."""

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from array import array
from types import SimpleNamespace

import pytest
from phalanx.rank import fork_server, protocol
from phalanx.rank.server import tls
from phalanx.rank.server.config import ServerConfig
from phalanx.rank.server.engine_client import EngineClient
from phalanx.rank.server.http.app import make_app, serve
from phalanx.rank.server.http.state import ServerState
from phalanx.rank.server.text_engine import TextEngine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .preloaded import Preloaded

SPECIAL = ["<|end|>", "<|turn|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog. " * 4,
    "hello world, how are you? I am fine. " * 4,
    "你好，世界。今天天气很好。",
    "naïve café 🙂🚀 emoji",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
]
TEMPLATE = (
    "{%- if tools %}<|turn|>tools\n{{ tools | tojson }} <tool_call>\n{% endif -%}"
    "{%- for m in messages -%}<|turn|>{{ m.role }}\n{% if m.role == 'bad' %}{{ raise_exception('no bad') }}{% endif %}"
    "{{ m.content }}{% generation %}{% endgeneration %}<|end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|turn|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif -%}"
    "{# </think> #}"
)


def make_model(path, template=TEMPLATE):
    """A directory as a model's, without weights."""
    path.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + MARKERS,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    data = json.loads(tokenizer.to_str())
    for token in data["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    (path / "tokenizer.json").write_text(json.dumps(data))
    config = {"eos_token": {"content": "<|end|>"}, "bos_token": None}
    if template:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text("{}")
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


class FakeScheduler:
    """Rank 0's end of the socket. Answers every request with the tokens of `answer`."""

    def __init__(self, path, encode, end_token):
        self.path = path
        self.encode = encode
        self.end_token = end_token
        self.answer = "hello world"
        self.tokens = None  # given: these instead of the answer's
        self.per_delta = 1
        self.pause = 0.0  # between deltas
        self.hold = False  # accept requests, answer nothing
        self.most = 1 << 30  # answer so many requests, hold the others
        self.error = None  # (status, message) for every request
        self.top = 0  # extra logprobs entries are made up as token 10, 11, ...
        self.requests = []
        self.drafted = 0, 0  # in each delta: guessed tokens, and those of them that were right
        self.vocabularies = []
        self.aborted = []
        self.drained = False
        self.ready = protocol.Ready(
            max_model_len=512, vocab_size=400, kv_tokens=4096, block_size=16, max_num_seqs=4, ranks=2
        )
        self.tasks = set()
        self.writer = None

    async def connect(self, ready=True):
        reader, self.writer = await asyncio.open_unix_connection(self.path)
        self.listener = asyncio.ensure_future(self._listen(reader))
        if ready:
            self.send(self.ready)

    def send(self, message):
        self.writer.write(protocol.frame(message))

    def close(self):
        self.listener.cancel()
        for task in self.tasks:
            task.cancel()
        self.writer.close()

    async def _listen(self, reader):
        frames = protocol.Frames(protocol.ToScheduler)
        while data := await reader.read(1 << 16):
            for message in frames.feed(data):
                if isinstance(message, protocol.Request):
                    self.requests.append(message)
                    task = asyncio.ensure_future(self._answer(message, len(self.requests)))
                    self.tasks.add(task)
                    task.add_done_callback(self._ended)
                elif isinstance(message, protocol.Vocabulary):
                    self.vocabularies.append(message)
                elif isinstance(message, protocol.Abort):
                    self.aborted += message.ids
                else:
                    self.drained = True
                    self._ended(None)

    def _ended(self, task):
        self.tasks.discard(task)
        if self.drained and not self.tasks:
            self.writer.close()

    async def _answer(self, request, number):
        while self.hold or number > self.most:
            await asyncio.sleep(0.005)
        if self.error:
            status, message = self.error
            return self.send(
                protocol.Deltas([protocol.Delta(request.id, finish="error", error=message, status=status)])
            )
        sampling = request.sampling
        if sampling.pooling:
            vector = array("f", [len(request.tokens) // 4, 3.0, 0.0, 4.0])
            return self.send(
                protocol.Deltas([protocol.Delta(request.id, [1], finish="length", embedding=vector.tobytes())])
            )
        tokens = list(self.tokens) if self.tokens is not None else self.encode(self.answer)
        finish = "stop" if len(tokens) < sampling.max_tokens and self.end_token in sampling.stop_token_ids else "length"
        while finish == "length" and len(tokens) < sampling.max_tokens and tokens:
            tokens += tokens
        tokens = tokens[: sampling.max_tokens]
        admitted = time.monotonic()
        for at in range(0, len(tokens), self.per_delta):
            if request.id in self.aborted:
                break
            part = tokens[at : at + self.per_delta]
            last = at + self.per_delta >= len(tokens)
            logprobs = []
            if sampling.logprobs >= 0:
                logprobs = [
                    protocol.TokenLogprob(t, -0.5, [(t, -0.5), (10, float("-inf"))][: sampling.logprobs]) for t in part
                ]
            self.send(
                protocol.Deltas(
                    [
                        protocol.Delta(
                            request.id,
                            part,
                            logprobs,
                            finish if last else "",
                            self.end_token if last and finish == "stop" else -1,
                            3 if at == 0 else 0,
                            admitted=admitted if at == 0 else 0.0,
                            drafted=self.drafted[0],
                            accepted=self.drafted[1],
                            prompt_logprobs=scored(request) if at == 0 else [],
                        )
                    ]
                )
            )
            await asyncio.sleep(self.pause)  # as a model that takes so long a step


def scored(request):
    """The second token of a prompt has -1, the third -2; likelier than it is token 10."""
    count = request.sampling.prompt_logprobs
    tokens = protocol.unpack_u32(request.tokens)[1:] if count >= 0 else []
    return [
        protocol.TokenLogprob(token, -1.0 * i, [(10, -0.5), (token, -1.0 * i)][:count])
        for i, token in enumerate(tokens, 1)
    ]


class LiveServer:
    """A server in a thread. `call` runs a coroutine or function on its loop."""

    def __init__(self, tmp_path, model_dir, tokenizer, connect, scheduler, sock=None, **options):
        self.sock = sock or socket.create_server(("127.0.0.1", 0))
        self.port = self.sock.getsockname()[1]
        self.config = ServerConfig(model_dir=str(model_dir), link=str(tmp_path / "link"), listen_fd=-1, **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
        self.scheduler = FakeScheduler(self.config.link, encode, tokenizer.token_to_id("<|end|>"))
        for name, value in scheduler.items():
            setattr(self.scheduler, name, value)
        self.call(self._start(connect))

    async def _start(self, connect):
        self.link = EngineClient(self.config.link, self.config.restarts_expected)
        self.engine = TextEngine(self.link, self.config)
        self.state = ServerState(self.engine, self.config)
        context = tls.server_context(self.config.tls_cert, self.config.tls_key) if self.config.tls_cert else None
        self.server = serve(make_app(self.state), self.sock, context)
        await self.link.listen()
        self.state.tools.start()
        await self.engine.load()
        if connect:
            await self.scheduler.connect()
            await self.link.wait_ready()

    def call(self, what, *args):
        async def run():
            result = what(*args) if callable(what) else what
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def wait(self, condition, timeout=30.0):
        """Until `condition()` holds, looked at from the loop."""

        async def poll():
            until = self.loop.time() + timeout
            while not condition():
                assert self.loop.time() < until, "timed out"
                await asyncio.sleep(0.005)

        self.call(poll())

    def request(self, method, path, body=None, headers=None):
        """One request; returns status, headers and the body, decoded where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            if body is not None and not isinstance(body, bytes | str):
                body = json.dumps(body)
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            data = response.read()
        if data and "json" in response.headers.get("Content-Type", ""):
            data = json.loads(data)
        return SimpleNamespace(status=response.status, headers=response.headers, body=data)

    @property
    def asked(self):
        """The prompt of the last request."""
        tokens = memoryview(self.scheduler.requests[-1].tokens).cast("I").tolist()
        return self.engine.text.tokenizer.decode(tokens)

    def post(self, path, **body):
        return self.request("POST", f"/v1/{path}", body)

    def events(self, path, **body):
        """The data events of a stream, [DONE] as that string."""
        answer = self.post(path, stream=True, **body)
        assert answer.status == 200, answer.body
        return parse_events(answer.body)

    def stop(self):
        async def stop():
            self.link.close()
            await self.state.tools.close()
            if self.scheduler.writer is not None:
                self.scheduler.close()
            self.server.stop()
            await self.server.close_all_connections()
            self.engine.close()
            if self.state.tracing is not None:
                await self.state.tracing.export.close(0.5)

        self.call(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()  # three descriptors; a process of many tests reaches what select() can take
        self.sock.close()


def parse_events(data):
    lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def preloaded():
    found = Preloaded("phalanx.rank.server.text_worker")
    yield found
    found.close()


@pytest.fixture(scope="module", autouse=True)
def text_processes(request, preloaded):
    """Only test_text_process.py starts the process as servers do."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.name.endswith("test_text_process.py"):
            patch.setattr(fork_server, "subprocess", preloaded)
        yield


@pytest.fixture(scope="module")
def make_server(tmp_path_factory, model_dir, tokenizer):
    """Makes a server for all tests of a module."""
    servers = []

    def make(scheduler=None, **options):
        options.setdefault("served_model_name", "tiny")
        servers.append(
            LiveServer(tmp_path_factory.mktemp("server"), model_dir, tokenizer, True, scheduler or {}, **options)
        )
        return servers[-1]

    yield make
    for one in servers:
        one.stop()


@pytest.fixture(scope="module")
def server(make_server):
    return make_server()


@pytest.fixture
def start_server(tmp_path, model_dir, tokenizer):
    servers = []

    def make(connect=True, model=None, scheduler=None, **options):
        options.setdefault("served_model_name", "tiny,other")
        servers.append(LiveServer(tmp_path, model or model_dir, tokenizer, connect, scheduler or {}, **options))
        return servers[-1]

    yield make
    for one in servers:
        one.stop()


@pytest.fixture
def fresh_server(start_server):
    return start_server()


@pytest.fixture
def client(fresh_server):
    import openai

    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{fresh_server.port}/v1", api_key="EMPTY", max_retries=0, timeout=20
    )
