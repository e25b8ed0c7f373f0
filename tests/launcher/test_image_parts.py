"""Images of messages that programs hand to the library."""

import base64
import io

import pytest
from phalanx.launcher.image_parts import with_image_urls
from PIL import Image


def message(image):
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]}


def url_of(changed):
    shown, text = changed["content"]
    assert shown["type"] == "image_url" and text == {"type": "text", "text": "what?"}
    return shown["image_url"]["url"]


def test_files_and_images_in_memory(tmp_path):
    red = Image.new("RGB", (3, 2), "red")
    red.save(tmp_path / "a.jpg")
    for image in (tmp_path / "a.jpg", str(tmp_path / "a.jpg")):
        head, _, body = url_of(with_image_urls(message(image))).partition(",")
        assert head == "data:image/jpeg;base64" and base64.b64decode(body) == (tmp_path / "a.jpg").read_bytes()
    body = url_of(with_image_urls(message(red))).partition(",")[2]
    assert Image.open(io.BytesIO(base64.b64decode(body))).getpixel((0, 0)) == (255, 0, 0)


def test_what_stays_as_it_is():
    for url in ("https://example.org/a.png", "data:image/png;base64,aa", "file:///a.png"):
        assert url_of(with_image_urls(message(url))) == url
    for other in ({"role": "user", "content": "hello"}, {"role": "user", "content": [{"type": "image"}]}, {}):
        assert with_image_urls(other) is other


def test_what_is_no_image(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        with_image_urls(message(str(tmp_path / "none.png")))
    with pytest.raises(ValueError, match="an image is int: expected a path"):
        with_image_urls(message(3))
