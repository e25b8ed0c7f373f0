"""Five hundred damaged and hostile images, sent to a live server beside a stream."""

import base64
import io
import json
import random
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from PIL import Image

from .. import retries
from ..rank.model.vision.seeing import add_text, picture, write_seeing
from ..rank.server.test_images import HOSTILE
from ..server import Server, Stream

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), retries.CLOCKS]
COUNT, CLIENTS = 500, 4
FORMS = "PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"
MODES = "RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I", "I;16", "F"
MIB = 1 << 20


def written(image, form, **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def hostile(seed):
    """An image that no well-meaning client sends, its kind drawn from all."""
    draw = random.Random(seed)
    kind = draw.choice(("odd", "cut", "flipped", "thin", "animated", "crafted", "renamed"))
    if kind == "crafted":
        return draw.choice([*HOSTILE.values()])
    if kind == "thin":
        return written(
            Image.new("L", (1, draw.choice((1, 3000, 30_000)))).rotate(draw.choice((0, 90)), expand=True), "PNG"
        )
    image = picture(draw.randrange(1, 200), draw.randrange(1, 200), seed)
    if kind == "animated":
        more = [image.rotate(i) for i in range(draw.randrange(1, 30))]
        return written(image, draw.choice(("GIF", "WEBP", "PNG")), save_all=True, append_images=more)
    if kind == "odd":
        for form in draw.sample(FORMS, len(FORMS)):
            try:
                return written(image.convert(draw.choice(MODES)), form)
            except (OSError, ValueError, KeyError):  # no such mode in this form
                continue
    data = bytearray(written(image, draw.choice(FORMS[:4])))
    if kind == "cut":
        del data[draw.randrange(len(data)) :]
    elif kind == "flipped":
        for _ in range(draw.randrange(1, 30)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    else:  # the signature of one kind before the data of another
        data[:8] = draw.choice(
            (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0\0\x10JF", b"RIFF\xff\xff\xff\xff", b"GIF89a\xff\xff")
        )
    return bytes(data)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = add_text(write_seeing(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))
    with Server(str(path), "--np", "1", "--device", "cpu", "--mem", "16", "--mm-cache-gb", "0") as one:
        yield one


def ask(server, data):
    """The status and the body of a chat about an image."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    body = json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()
    request = urllib.request.Request(server.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class Watched(threading.Thread):
    """Reads a stream and notes the longest time between two of its tokens."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.stream, self.longest, self.tokens, self.stopped = Stream(server, 400), 0.0, 0, False
        self.server = server

    def run(self):
        last = time.monotonic()
        while True:
            line = self.stream.answer.readline()
            if not line or line.startswith(b"data: [DONE]"):
                if self.stopped:
                    return
                self.stream, last = Stream(self.server, 400), time.monotonic()
            elif line.strip():
                now = time.monotonic()
                self.longest, last, self.tokens = max(self.longest, now - last), now, self.tokens + 1

    def stop(self):
        self.stopped = True
        self.join(60)


def resident(server):
    """MiB of the job's processes, without the decoder of images: that one has a limit, and is ended beyond it."""
    job = psutil.Process(server.process.pid)
    processes = [one for one in (job, *job.children(recursive=True)) if "image_worker" not in " ".join(one.cmdline())]
    return sum(one.memory_info().rss for one in processes) / MIB


def attack(server, seeds):
    found = {}

    def client(mine):
        for seed in mine:
            found[seed] = ask(server, hostile(seed))

    threads = [threading.Thread(target=client, args=(seeds[i::CLIENTS],)) for i in range(CLIENTS)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(300)
    return found


def test_hostile_images(server, record_property):
    alone = Watched(server)
    alone.start()
    time.sleep(3)
    alone.stop()
    beside = Watched(server)
    beside.start()
    found = attack(server, range(COUNT // 2))
    half = resident(server)  # pools and caches are full, and memory is as it stays
    found |= attack(server, range(COUNT // 2, COUNT))
    beside.stop()
    assert len(found) == COUNT and {status for status, _ in found.values()} == {200, 400}
    for status, body in found.values():
        assert status == 200 or body["error"]["param"].startswith("messages[0].content[0]"), body
    refused = sum(status == 400 for status, _ in found.values())
    assert COUNT / 4 < refused < COUNT
    grown = resident(server) - half
    for name, value in (("refused", refused), ("grown", grown), ("alone", alone.longest), ("beside", beside.longest)):
        record_property(name, value)
    print(f"{refused} refused, {grown:.1f} MiB more, longest pause {alone.longest:.3f} s alone, {beside.longest:.3f} s")
    assert grown < 24 and beside.longest < max(1.0, 10 * alone.longest)
    assert ask(server, written(picture(60, 60), "PNG"))[0] == 200
