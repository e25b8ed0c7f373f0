"""Images of requests: what is taken in each API, and what is refused, damaged and hostile ones first of all."""

import base64
import http.server
import importlib.util
import io
import json
import os
import random
import shutil
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from phalanx.rank import protocol
from phalanx.rank.server import image_fetcher, image_sources
from phalanx.rank.server import images as images_module
from phalanx.rank.vision import blip
from PIL import Image
from tokenizers import Tokenizer

from .conftest import LiveServer, make_model
from .http.batching import begin, client_of, line, read, servers_of_one_store, until

pytestmark = pytest.mark.timeout(120)
TEMPLATE = (
    "{%- for m in messages -%}<|turn|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>\n{% endfor -%}{%- if add_generation_prompt %}<|turn|>assistant\n{% endif -%}"
)
PIXEL = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
READY = protocol.Ready(
    max_model_len=512, vocab_size=410, kv_tokens=4096, block_size=16, max_num_seqs=4, ranks=2, images=True
)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A directory of images, and what lies beside it."""
    path = tmp_path_factory.mktemp("media") / "images"
    path.mkdir()
    Image.new("RGB", (60, 60), "red").save(path / "red.png")
    (path.parent / "secret.png").write_bytes((path / "red.png").read_bytes())
    shutil.copytree(path, path.with_name("images-of-others"))
    (path / "link.png").symlink_to(path.parent / "secret.png")
    os.mkfifo(path / "fifo.png")
    (path / "large.png").touch()
    os.truncate(path / "large.png", image_sources.LARGEST + 1)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = make_model(tmp_path_factory.mktemp("models") / "seeing", TEMPLATE)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(path / "tokenizer.json"))
    token = tokenizer.token_to_id("<|image|>")
    vision = {"patch_size": 14, "spatial_merge_size": 2}
    config = {"model_type": "qwen2_5_vl", "image_token_id": token, "vision_config": vision}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def hosts():
    """A server of images, which redirects, and the paths that it was asked for."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/to/"):
                self.send_response(302)
                self.send_header("Location", self.path.removeprefix("/to/"))
                self.end_headers()
            elif self.path == "/missing":
                self.send_error(404)
            elif self.path == "/page":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"<!DOCTYPE html><title>a page</title>")
            elif self.path == "/large":
                self.send_response(200)
                self.send_header("Content-Length", str(1 << 40))
                self.end_headers()
            else:
                data = base64.b64decode(PIXEL.partition(",")[2])
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, model, images):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    made = LiveServer(
        tmp_path_factory.mktemp("server"), model, tokenizer, True, {"ready": READY}, served_model_name="seeing",
        images_per_prompt=3, allowed_media_dir=str(images), allowed_media_hosts=["127.0.0.1", "localtest.invalid"],
    )  # fmt: skip
    yield made
    made.stop()


def url_of(image, form="PNG", **options):
    file = io.BytesIO()
    image.save(file, form, **options)
    return as_url(file.getvalue(), form)


def as_url(data, form="png"):
    return f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"


def chat(server, *urls, **fields):
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "what?"})
    return server.post("chat/completions", messages=[{"role": "user", "content": content}], max_tokens=2, **fields)


def shown(server):
    """The images of the last request, as numpy arrays."""
    pixels = {one.digest: one for one in server.scheduler.requests[-1].pixels}
    asked = [pixels[one.digest] for one in server.scheduler.requests[-1].pictures]
    return [np.frombuffer(one.data, np.uint8).reshape(one.height, one.width, 3) for one in asked]


def test_a_prompt_with_images(seeing):
    """A token for each 28 x 28 pixels; usage counts them. An image that stands twice goes to rank 0 once."""
    red, blue = Image.new("RGB", (56, 84), "red"), Image.new("RGB", (140, 56), "blue")
    answer = chat(seeing, url_of(red), url_of(blue), url_of(red))
    assert answer.status == 200, answer.body
    request = seeing.scheduler.requests[-1]
    tokens = memoryview(request.tokens).cast("I").tolist()
    assert answer.body["usage"]["prompt_tokens"] == len(tokens)
    places = [(one.length, one.rows, one.columns) for one in request.pictures]
    assert places == [(6, 3, 2), (10, 2, 5), (6, 3, 2)] and len(request.pixels) == 2
    image_token = seeing.engine.text.tokenizer.added["<|image|>"]
    for one in request.pictures:
        assert set(tokens[one.start : one.start + one.length]) == {image_token}
    assert tokens.count(image_token) == 22
    assert (shown(seeing)[1] == (0, 0, 255)).all()


@pytest.mark.parametrize("mode, colour, seen", [
    ("RGBA", (255, 0, 0, 0), (255, 255, 255)), ("RGBA", (255, 0, 0, 255), (255, 0, 0)), ("L", 7, (7, 7, 7)),
    ("P", 0, (0, 0, 0)), ("1", 1, (255, 255, 255)), ("I;16", 65535, (255, 255, 255)), ("LA", (9, 255), (9, 9, 9)),
])  # fmt: skip
def test_modes(seeing, mode, colour, seen):
    assert chat(seeing, url_of(Image.new(mode, (56, 56), colour))).status == 200
    assert (shown(seeing)[0] == seen).all()


def test_formats(seeing):
    image = Image.new("RGB", (56, 56), "white")
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        assert chat(seeing, url_of(image, form)).status == 200
        assert (shown(seeing)[0] > 250).all()
    assert chat(seeing, url_of(image.convert("CMYK"), "JPEG")).status == 200
    frames = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    assert chat(seeing, url_of(frames[0], "GIF", save_all=True, append_images=frames[1:])).status == 200
    assert (shown(seeing)[0] == (255, 0, 0)).all()


def test_upright(seeing):
    """A camera that was turned says so: EXIF's orientation 6 is a quarter turn."""
    image = Image.new("RGB", (112, 56), "black")
    exif = image.getexif()
    exif[0x0112] = 6
    assert chat(seeing, url_of(image, "JPEG", exif=exif)).status == 200
    assert shown(seeing)[0].shape == (112, 56, 3)


def test_detail(seeing):
    large = Image.new("RGB", (1120, 560))
    for detail, most in (("low", 512 * 512), ("high", 1120 * 560), ("auto", 1120 * 560)):
        content = [{"type": "image_url", "image_url": {"url": url_of(large), "detail": detail}}]
        answer = seeing.post("chat/completions", messages=[{"role": "user", "content": content}], max_tokens=2)
        if answer.status == 200:
            height, width, _ = shown(seeing)[0].shape
            assert most * 0.8 < height * width <= most
        else:  # 800 tokens do not fit
            assert most > 512 * 512 and answer.body["error"]["code"] == "context_length_exceeded"


def test_what_the_ranks_take(start_server, model):
    """On CPUs a tower takes so long that images are scaled down further."""
    ready = msgspec.structs.replace(READY, image_pixels=60_000)
    server = start_server(model=model, scheduler={"ready": ready})
    for detail in ("auto", "low"):
        image = {"url": url_of(Image.new("RGB", (560, 280))), "detail": detail}
        content = [{"type": "image_url", "image_url": image}]
        assert server.post("chat/completions", messages=[{"role": "user", "content": content}]).status == 200
        height, width, _ = shown(server)[0].shape
        assert 40_000 < height * width <= 60_000


def test_the_other_apis(seeing):
    url = url_of(Image.new("RGB", (56, 56), "red"))
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]}
    assert seeing.post("responses", input=[item], max_output_tokens=2).status == 200
    assert (shown(seeing)[0] == (255, 0, 0)).all() and seeing.asked.index("a") < seeing.asked.index("<|image|>")
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    image = {"type": "image", "source": source}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "b"}]}]
    assert seeing.post("messages", messages=messages, max_tokens=2).status == 200
    assert (shown(seeing)[0] == (255, 0, 0)).all()
    count = seeing.post("messages/count_tokens", messages=messages)
    assert count.body["input_tokens"] == len(seeing.scheduler.requests[-1].tokens) // 4
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, image]}
    turns = [*messages, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert seeing.post("messages", messages=turns, max_tokens=2).status == 200
    assert len(shown(seeing)) == 2
    output = [{"type": "input_image", "image_url": url}]
    items = [item, {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}]
    items.append({"type": "function_call_output", "call_id": "c", "output": output})
    assert seeing.post("responses", input=items, max_output_tokens=2).status == 200
    assert len(shown(seeing)) == 2


def test_batches(tmp_path, model):
    """A file's lines have images as chats do. One that is refused fails alone."""
    tokenizer, urls = Tokenizer.from_file(str(model / "tokenizer.json")), (PIXEL, as_url(b"hello"))
    content = [[{"type": "image_url", "image_url": {"url": url}}] for url in urls]
    bodies = [{"messages": [{"role": "user", "content": one}], "max_tokens": 2} for one in content]
    with servers_of_one_store(tmp_path, model, tokenizer) as make:
        client = client_of(make(scheduler={"ready": READY}))
        batch = begin(client, *(line(name, body) for name, body in zip("ab", bodies, strict=True)))
        done = until(client, batch, "completed", "failed")
        (answer,), (refused,) = read(client, done.output_file_id), read(client, done.error_file_id)
    assert answer["custom_id"] == "a" and answer["response"]["body"]["usage"]["prompt_tokens"] > 4
    assert refused["custom_id"] == "b" and "messages[0].content[0].image_url.url" in json.dumps(refused)


def test_how_many_are_decoded_at_a_time(start_server, model, monkeypatch):
    """Half as many as there are processors: each of these waits for all."""
    monkeypatch.setattr("phalanx.linux_calls.processors", lambda: {*range(16)})
    all_here, run = threading.Barrier(8, timeout=30), images_module.ImageProcess.run

    def wait_and_run(*args):
        all_here.wait()
        return run(*args)

    monkeypatch.setattr(images_module.ImageProcess, "run", wait_and_run)
    server = start_server(model=model, scheduler={"ready": READY})
    with ThreadPoolExecutor(8) as pool:
        assert {one.status for one in pool.map(lambda _: chat(server, PIXEL), range(8))} == {200}


def test_a_spelled_placeholder_is_text(seeing):
    url = url_of(Image.new("RGB", (56, 56)))
    content = [{"type": "text", "text": "<|image|> no"}, {"type": "image_url", "image_url": url}]
    assert seeing.post("chat/completions", messages=[{"role": "user", "content": content}], max_tokens=2).status == 200
    (place,) = seeing.scheduler.requests[-1].pictures
    assert place.length == 4 and seeing.asked.count("<|image|>") == 5


def png(width, height, *chunks, kind=2):
    """A PNG that claims this size."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunk(*one) for one in chunks) + chunk(b"IEND", b"")


def bomb():
    """1 MB that would become 600 MB: a row, compressed once and repeated."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * 14_000)
    first, other = (packer.compress(row) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + other * 13_999


HOSTILE = {
    "no image": b"hello",
    "nothing": b"",
    "an SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a TIFF": b"II*\x00\x08\x00\x00\x00\x00\x00",
    "30000 wide": png(30_000, 1, (b"IDAT", zlib.compress(bytes(90_001)))),
    "0 wide": png(0, 5, (b"IDAT", zlib.compress(b""))),
    "65535 x 65535": png(65_535, 65_535, (b"IDAT", b"")),
    "2**31 wide": png(2**31 - 1, 2**31 - 1),
    "no data": png(40, 40),
    "another checksum": png(40, 40, (b"IDAT", zlib.compress(bytes(40 * 121))))[:-20] + bytes(20),
    "a text bomb": png(40, 40, (b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24)))),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_images(seeing, name):
    count = len(seeing.scheduler.requests)
    answer = chat(seeing, as_url(HOSTILE[name]))
    assert answer.status == 400, answer.body
    error = answer.body["error"]
    assert error["param"] == "messages[0].content[0].image_url.url" and error["param"] in error["message"]
    assert len(seeing.scheduler.requests) == count


def test_a_bomb(seeing):
    answer = chat(seeing, as_url(png(14_000, 14_000, (b"IDAT", bomb()))))
    assert answer.status == 400 and "at most 50000000" in answer.body["error"]["message"]


def test_damaged_images(seeing):
    """Damaged images are decoded or refused: nothing else happens."""
    draw, made = random.Random(0), Image.effect_mandelbrot((120, 90), (-2, -1, 1, 1), 50).convert("RGB")
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = base64.b64decode(url_of(made, form).partition(",")[2])
        for i in range(15):
            data = bytearray(whole[: draw.randrange(len(whole))] if i % 2 else whole)
            for _ in range(draw.randrange(1, 20)):
                if data:
                    data[draw.randrange(len(data))] = draw.randrange(256)
            assert chat(seeing, as_url(bytes(data), form)).status in (200, 400)
    assert chat(seeing, url_of(made)).status == 200


@pytest.mark.parametrize("url, why", [
    ("", "image_url.url is missing"),
    ("data:image/png,abc", "expected data:image/png;base64"),
    ("data:image/png;base64,@@@", "is no base64"),
    ("ftp://127.0.0.1/a.png", "expected a data: URL"),
    ("javascript:alert(1)", "expected a data: URL"),
    ("file:///etc/passwd", "no such file within"),
    ("file://DIR/../secret.png", "no such file within"),
    ("file://DIR/%2e%2e/secret.png", "no such file within"),
    ("file://DIR/link.png", "no such file within"),
    ("file://DIR-of-others/red.png", "no such file within"),
    ("file://DIR/fifo.png", "no such file within"),
    ("file://DIR", "no such file within"),
    ("file://DIR/none.png", "no such file within"),
    ("file://elsewhereDIR/red.png", "no such file within"),
    ("file://DIR/red%00.png", "no such file within"),
    ("file://[/red.png", "no such file within"),
    ("http://169.254.169.254/latest/meta-data", "not among those"),
    ("http://[::1]/a.png", "not among those"),
    ("http://[::ffff:127.0.0.1]/a.png", "not among those"),
    ("http://2130706433/a.png", "not among those"),
    ("http://0x7f.1/a.png", "not among those"),
    ("http://localhost/a.png", "not among those"),
    ("http://127.0.0.1@evil.example/a.png", "and no user"),
    ("http://evil.example#@127.0.0.1/a.png", "not among those"),
    ("http://evil.example\\@127.0.0.1/a.png", None),
    ("http:///a.png", "not among those"),
    ("http://[", "no URL"),
])  # fmt: skip
def test_urls_that_are_refused(seeing, images, url, why):
    answer = chat(seeing, url.replace("DIR", str(images)))
    assert answer.status == 400, answer.body
    assert why is None or why in answer.body["error"]["message"]


def test_files(seeing, images):
    assert chat(seeing, f"file://{images}/red.png").status == 200
    assert (shown(seeing)[0] == (255, 0, 0)).all()
    large = chat(seeing, f"file://{images}/large.png")
    assert large.status == 400 and large.body["error"]["code"] == "too_large"


def test_other_media(seeing):
    """Further ways in which other servers take images, videos and sounds: none is left out in silence."""
    url = {"url": PIXEL}
    for part in (
        {"type": "video_url", "video_url": url},
        {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}},
        {"type": "image_embeds", "image_embeds": "aGVsbG8="},
        {"type": "image_url", "image_url": {}, "uuid": "sent before"},
    ):
        answer = seeing.post("chat/completions", messages=[{"role": "user", "content": [part]}], max_tokens=2)
        assert answer.status == 400 and answer.body["error"]["param"].startswith("messages[0].content[0]"), answer.body
        assert "image_url" in answer.body["error"]["message"]
    for field in ("mm_processor_kwargs", "media_io_kwargs"):
        answer = chat(seeing, PIXEL, **{field: {"max_pixels": 1}})
        assert answer.status == 400 and answer.body["error"]["param"] == field
        assert chat(seeing, PIXEL, **{field: {}}).status == 200
    prompt = {"prompt_string": "<__media__> what?", "multimodal_data": [PIXEL.partition(",")[2]]}
    answer = seeing.post("completions", prompt=prompt, max_tokens=2)
    assert answer.status == 400 and answer.body["error"]["param"] == "prompt"
    named = {"type": "image_url", "image_url": url | {"other": 1}, "uuid": "mine"}
    assert seeing.post("chat/completions", messages=[{"role": "user", "content": [named]}], max_tokens=2).status == 200


def test_fetched_images(seeing, hosts):
    """An address that was allowed as it is may be a private one. Redirects are URLs like the first."""
    base, asked = hosts
    assert chat(seeing, f"{base}/a.png").status == 200
    assert chat(seeing, f"{base}/to/{base}/b.png").status == 200
    for path, why in (
        ("/missing", "answers 404"),
        ("/large", "cannot be fetched"),
        ("/page", "no image"),
        ("/to/http://localhost:1/", "not among those"),
        ("/to/http://[::1]:1/", "not among those"),
        ("/to/file:///red.png", "expected http or https"),
        ("/to/http://[", "which is none"),
        (f"/to/{base}/to/{base}/to/{base}/to/{base}/x.png", "more than 3 others"),
    ):
        answer = chat(seeing, base + path)
        assert answer.status == 400 and why in answer.body["error"]["message"], answer.body
    assert "/b.png" in asked and "/x.png" not in asked
    for path, status in (("/c.png", 200), ("/to/http://localhost:1/", 400)):
        block = {"type": "image", "source": {"type": "url", "url": base + path}}
        answer = seeing.post("messages", messages=[{"role": "user", "content": [block]}], max_tokens=2)
        assert answer.status == status, answer.body
    assert "/c.png" in asked


@pytest.mark.parametrize("address, public", [
    ("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("10.1.2.3", False), ("192.168.1.1", False),
    ("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("::1", False),
    ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("64:ff9b::a00:1", False),
    ("2002:a00:1::", False), ("::", False), ("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True), ("::a00:1", False),
    ("fec0::1", False), ("64:ff9b:1::a00:1", False), ("::ffff:0:a00:1", False), ("ff0e::1", False),
    ("192.0.0.192", False), ("168.63.129.16", False), ("::ffff:168.63.129.16", False),
])  # fmt: skip
def test_public_addresses(address, public):
    assert image_fetcher.is_public(address) == public


def test_names_of_private_addresses(seeing, hosts):
    """A name that is allowed, as any is by *, must not lead into the site."""
    sources = image_sources.ImageSources(["*", "localtest.invalid"], "")

    async def get(url):
        try:
            await sources.get(url, "at")
        except image_sources.ApiError as error:
            return error.message
        finally:
            sources.close()
            sources._fetcher = None

    port = hosts[0].rpartition(":")[2]
    for host in ("127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "[::1]", "127.1"):
        said = seeing.call(get(f"http://{host}:{port}/hidden"))
        assert "no public address" in said or "cannot be fetched" in said, said
    assert "/hidden" not in hosts[1]
    assert "cannot be fetched" in seeing.call(get("http://localtest.invalid/"))


def test_pixels_of_open_requests_are_bounded(start_server, model, monkeypatch):
    """A file of some kilobytes may become many megabytes, which are there until the answer is."""
    monkeypatch.setattr(images_module, "MAX_OPEN", 2 * 560 * 280 * 3)
    server = start_server(model=model, scheduler={"ready": READY, "hold": True})
    url = url_of(Image.new("RGB", (560, 280)))
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(chat(server, url))) for _ in range(2)]
    for one in threads:
        one.start()
    server.wait(lambda: len(server.scheduler.requests) == 2)
    refused = chat(server, url)
    assert refused.status == 429 and refused.body["error"]["code"] == "busy"
    server.scheduler.hold = False
    for one in threads:
        one.join()
    assert [one.status for one in answers] == [200, 200]
    for _ in range(3):
        assert chat(server, url, n=2).status == 200
    assert chat(server, url, n=3).status == 429
    assert chat(server, url).status == 200


def test_too_many(seeing):
    answer = chat(seeing, *[PIXEL] * 4)
    assert answer.status == 400 and answer.body["error"]["param"] == "messages[0].content[3]"
    assert "at most 3 " in answer.body["error"]["message"]


def test_pixels_of_a_request(seeing, monkeypatch):
    """Each choice has its own. It is refused before all is decoded; an image that stands twice counts once."""
    monkeypatch.setattr(images_module, "MAX_BYTES", 2 * 56 * 56 * 3)
    urls = [url_of(Image.new("RGB", (56, 56), colour)) for colour in ("red", "green", "blue")]
    assert chat(seeing, urls[0], urls[1], urls[0]).status == 200
    assert chat(seeing, urls[0], n=2).status == 200
    for answer in (chat(seeing, *urls), chat(seeing, *urls[:2], n=2)):
        assert answer.status == 400 and "pixels together" in answer.body["error"]["message"]


def test_keys_share_what_open_requests_may_have(start_server, model, monkeypatch):
    for name, count in (("MAX_OPEN", 2), ("MAX_BYTES", 1)):
        monkeypatch.setattr(images_module, name, count * 56 * 56 * 3)
    server = start_server(model=model, scheduler={"ready": READY, "hold": True}, api_keys=["a", "b"])
    image = {"type": "image_url", "image_url": {"url": url_of(Image.new("RGB", (56, 56)))}}
    body = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 2}

    def ask(key):
        return server.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}"}).status

    with ThreadPoolExecutor(2) as pool:
        open_now = [pool.submit(ask, "a")]
        server.wait(lambda: len(server.scheduler.requests) == 1)
        assert ask("a") == 429
        open_now.append(pool.submit(ask, "b"))
        server.wait(lambda: len(server.scheduler.requests) == 2)
        server.scheduler.hold = False
        assert [one.result() for one in open_now] == [200, 200]


def test_other_roles_and_endpoints(seeing):
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    for role in ("system", "assistant", "tool"):
        messages = [{"role": "user", "content": "a"}, {"role": role, "content": [image]}]
        answer = seeing.post("chat/completions", messages=messages)
        assert answer.status == 400
        assert "messages of the user" in answer.body["error"]["message"]
    messages = [{"role": "user", "content": [image]}]
    answer = seeing.request("POST", "/tokenize", {"messages": messages})
    assert answer.status == 400
    assert "text only" in answer.body["error"]["message"]
    answer = seeing.post("chat/completions", messages=messages, record_conversation=True)
    assert answer.status == 400 and "not recorded" in answer.body["error"]["message"]
    answer = seeing.post("chat/completions", messages=messages, truncate_prompt_tokens=10)
    assert answer.status == 400 and "are not cut" in answer.body["error"]["message"]


def test_models_that_take_one_image(start_server, model, tmp_path):
    """BLIP's: a chat needs an image, and has the last that was shown."""
    seeing = shutil.copytree(model, tmp_path / "blip")
    token = Tokenizer.from_file(str(seeing / "tokenizer.json")).token_to_id("<|image|>")
    text = {"vocab_size": 410, "cls_token_id": token, "sep_token_id": 1, "bos_token_id": 2}
    config = {"architectures": [blip.ANSWERS], "vision_config": {"image_size": 28, "patch_size": 14}}
    (seeing / "config.json").write_text(json.dumps(config | {"model_type": "blip", "text_config": text}))
    (seeing / "chat_template.jinja").write_text("<|image|>{{ messages[-1].content }}")
    server = start_server(model=seeing, scheduler={"ready": READY})
    answer = chat(server)
    assert answer.status == 400 and "no image" in answer.body["error"]["message"]
    red, blue = ({"type": "image_url", "image_url": url_of(Image.new("RGB", (9, 9), one))} for one in ("red", "blue"))
    turns = [
        {"role": "user", "content": [red]}, {"role": "assistant", "content": "red"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, blue]}, {"role": "assistant", "content": "blue"},
        {"role": "user", "content": "is it?"},
    ]  # fmt: skip
    answer = server.post("chat/completions", messages=turns, max_tokens=2)
    assert answer.status == 200, answer.body
    (seen,) = shown(server)
    assert len(server.scheduler.requests[-1].pixels) == 1 and (seen == (0, 0, 255)).all()
    turns[2]["content"].append(red)
    answer = server.post("chat/completions", messages=turns, max_tokens=2)
    assert answer.status == 400 and "2 images" in answer.body["error"]["message"]


def test_a_model_without_a_tower(start_server):
    """The ranks have the last word: its checkpoint may lack what its config.json speaks of."""
    answer = chat(start_server(), PIXEL)
    assert answer.status == 400
    assert "image_url" in answer.body["error"]["message"]
    assert "text only" in answer.body["error"]["message"]


def test_no_url_without_options(start_server, model, hosts):
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= READY.vocab_size
    server = start_server(model=model, scheduler={"ready": READY})
    for url, option in ((f"{hosts[0]}/a.png", "--allowed-media-hosts"), ("file:///red.png", "--allowed-media-dir")):
        answer = chat(server, url)
        assert answer.status == 400 and option in answer.body["error"]["message"]


@pytest.mark.parametrize("missing", [True, False])
def test_no_pillow(start_server, model, monkeypatch, missing):
    """It is an extra: without it, or with one that does not start, texts are answered and images refused."""
    if missing:
        find = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "PIL" else find(name, *of))
    else:
        monkeypatch.setattr("phalanx.rank.server.images.ImageProcess.MODULE", "no_such_worker")
    server = start_server(model=model, scheduler={"ready": READY})
    answer = chat(server, PIXEL)
    assert answer.status == 400 and "Pillow" in answer.body["error"]["message"]
    assert chat(server).status == 200


def test_no_images_at_all(start_server, model):
    """Their decoder is not started."""
    server = start_server(model=model, scheduler={"ready": READY}, images_per_prompt=0)
    assert server.engine._images is None and chat(server, PIXEL).status == 400
