"""Messages over sockets that block and that do not."""

import socket

import msgspec
import pytest
from phalanx.rank.framed_socket import FramedSocket


class Note(msgspec.Struct, array_like=True):
    text: str


@pytest.fixture(params=[False, True], ids=["does not block", "blocks"])
def ends(request):
    made = socket.socketpair()
    made[0].setblocking(request.param)
    with made[0], made[1]:
        yield FramedSocket(made[0], Note), FramedSocket(made[1], Note)


def test_messages_come_whole_and_in_order(ends):
    one, two = ends
    two.send(Note("a"), Note("b"))
    two.send(Note("c"))
    assert one.receive() == [Note("a"), Note("b"), Note("c")] and one.received == 3 * (4 + 3)
    one.send_rest(1.0, Note("d"))
    assert two.receive() == [Note("d")]
    two.socket.close()
    one.send(Note("to nobody"))
    assert one.receive() is None


def test_what_the_socket_does_not_take_waits():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        one, two = FramedSocket(ours, Note), FramedSocket(theirs, Note)
        long = Note("x" * (4 << 20))
        one.send(long, Note("end"))
        assert one.unsent and one.receive() == []
        came = []
        while len(came) < 2:
            one.flush()
            came += two.receive()
        assert came == [long, Note("end")] and not one.unsent


class Interrupted:
    """A socket whose sends are interrupted by a handler: while it sends, or after."""

    def __init__(self, sock, handler, within):
        self._socket, self._handler, self._within = sock, handler, within
        self.calls = 0

    def send(self, data):
        with memoryview(data):  # as socket.send holds it
            if self._within:
                self._interrupt()
            size = self._socket.send(data[:5])
        if not self._within:
            self._interrupt()
        return size

    def _interrupt(self):
        self.calls += 1
        if self.calls == 1:
            self._handler()


@pytest.mark.parametrize("within", [False, True])
def test_a_signal_handler_that_sends_while_something_is_sent(within):
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.settimeout(20)
    with ours, theirs:
        one, two = FramedSocket(ours, Note), FramedSocket(theirs, Note)
        one.socket = Interrupted(ours, lambda: one.send(Note("from the handler")), within)
        one.send(Note("a"), Note("b"))
        assert not one.unsent and one.socket.calls > 1
        came = []
        while len(came) < 3:
            came += two.receive()
        assert came == [Note("a"), Note("b"), Note("from the handler")]
        assert two.received == sum(4 + 2 + len(note.text) for note in came)
