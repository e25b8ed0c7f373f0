import msgspec
from phalanx.rank.server.json_line import encode
from phalanx.rank.server.renderer import sse


def test_any_text_stays_in_one_line():
    """Every character that there is; ten of them end a line."""
    text = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    line = encode({text: [text]})
    assert len(line.decode().splitlines()) == 1
    assert msgspec.json.decode(line) == {text: [text]}


def test_an_event_is_two_lines_and_an_empty_one():
    assert len(sse("delta", text="a\u0085b\u2028c").decode().splitlines()) == 3
