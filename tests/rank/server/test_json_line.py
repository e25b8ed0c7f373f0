import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from phalanx.rank.server.json_line import encode
from phalanx.rank.server.renderer import sse


@given(st.text())
@example("".join(map(chr, [0x0A, 0x0B, 0x0C, 0x0D, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029])))  # all that end a line
def test_any_text_stays_in_one_line(text):
    line = encode({text: [text]})
    assert len(line.decode().splitlines()) == 1
    assert msgspec.json.decode(line) == {text: [text]}


def test_an_event_is_two_lines_and_an_empty_one():
    assert len(sse("delta", text="a\u0085b\u2028c").decode().splitlines()) == 3
