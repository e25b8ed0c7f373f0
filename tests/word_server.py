"""A server that answers as many words as asked for, or fails as a test plans it: what loads are tried on."""

import asyncio
import contextlib
import json
import socket
import threading
from types import SimpleNamespace

import tornado.httpserver
import tornado.iostream
import tornado.netutil
import tornado.web

PER_WORD, OVERHEAD = 3, 11  # tokens, as this server counts
IDS = [7, 900, 901, 902, 903]


def count(body):
    if isinstance(body.get("prompt"), list):
        return len(body["prompt"])
    texts = [body["prompt"]] if "prompt" in body else [text_of(m["content"]) for m in body["messages"]]
    return OVERHEAD + PER_WORD * sum(len(text.split()) for text in texts)


def text_of(content):
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


class Models(tornado.web.RequestHandler):
    def get(self):
        self.application.state.keys.append(self.request.headers.get("Authorization"))
        if self.application.state.models is None:
            raise tornado.web.HTTPError(404)
        self.finish(self.application.state.models)


class Generate(tornado.web.RequestHandler):
    """Answers with as many words as asked for, or as the next entry of `state.plan` says."""

    async def post(self):
        self.state = self.application.state
        self.body = json.loads(self.request.body)
        self.chat = "messages" in self.body
        if not self.body.get("stream"):
            choice = {"prompt_token_ids": IDS} if self.body.get("return_token_ids") and self.state.tells_ids else {}
            self.finish({"choices": [choice], "usage": {"prompt_tokens": count(self.body), "completion_tokens": 1}})
            return
        self.state.bodies.append(self.body)
        self.state.active += 1
        self.state.max_active = max(self.state.max_active, self.state.active)
        try:
            with contextlib.suppress(tornado.iostream.StreamClosedError):
                await self.answer(self.state.plan.pop(0) if self.state.plan else "good")
        finally:
            self.state.active -= 1

    async def answer(self, how):
        if isinstance(how, int):
            self.set_status(how)
            self.set_header("Retry-After", "0")
            self.finish({"error": {"message": f"no\nroom for {len(self.state.bodies)}", "type": "x"}})
            return
        self.set_header("Content-Type", "text/event-stream")
        if how == "hang":
            await self.flush()
            await asyncio.sleep(5)  # longer than its client waits
        await asyncio.sleep(self.state.first)  # as a model that takes so long for the first token
        self.write(": keep-alive\n\n")
        if self.chat:
            self.event({"delta": {"role": "assistant", "content": ""}})
        for i in range(self.body["max_tokens"]):
            if i:
                await asyncio.sleep(self.state.step)  # as a model that takes so long for each other token
            if how == "cut" and i == 1:
                self.detach().close()
                return
            if how != "silent":
                self.event({"delta": {"content": f" w{i}"}} if self.chat else {"text": f" w{i}"})
            await self.flush()
        if how == "error":
            self.write('data: {"error": {"message": "a rank was lost"}}\n\n')
            return
        if how != "endless":
            self.event({"delta": {}, "text": "", "finish_reason": "length"})
        if how != "no usage":
            usage = {
                "prompt_tokens": count(self.body),
                "completion_tokens": self.body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 5},
                "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
            }
            self.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n")
        self.write("data: what\n\n" if how == "junk" else "data: [DONE]\n\n")

    def event(self, choice):
        self.write(f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n")


def make_state():
    return SimpleNamespace(
        plan=[],
        bodies=[],
        keys=[],
        active=0,
        max_active=0,
        first=0.0,
        step=0.0,
        tells_ids=True,
        models={"data": [{"id": "real", "max_model_len": 100_000}]},
    )


@contextlib.contextmanager
def running():
    """Its application, whose `state` each test makes anew."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    application = tornado.web.Application(
        [(r"/v1/models", Models), (r"/v1/(?:chat/)?completions", Generate)], log_function=lambda handler: None
    )
    ready = threading.Event()
    held = SimpleNamespace(application=application, port=port)

    async def main():
        held.stop = asyncio.Event()
        held.loop = asyncio.get_running_loop()
        server = tornado.httpserver.HTTPServer(application)
        sock.setblocking(False)
        server.add_socket(sock)
        ready.set()
        await held.stop.wait()
        server.stop()
        await server.close_all_connections()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(5)
    yield held
    held.loop.call_soon_threadsafe(held.stop.set)
    thread.join(5)
    assert not thread.is_alive()


def fresh(running):
    """The state that a test begins with."""
    running.application.state = state = make_state()
    state.port, state.url = running.port, f"http://127.0.0.1:{running.port}"
    return state
