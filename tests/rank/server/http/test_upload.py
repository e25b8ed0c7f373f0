"""An upload whose client leaves."""

import threading
import time

from phalanx.rank.server.file_store import FileStore
from phalanx.rank.server.http.upload import Upload

HEAD = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{}'


def test_a_client_that_leaves_while_a_thread_writes(tmp_path):
    store = FileStore(str(tmp_path))
    began, go = threading.Event(), threading.Event()
    made = store.new

    def new(*args):
        began.set()
        assert go.wait(20)
        return made(*args)

    store.new = new
    upload = Upload("multipart/form-data; boundary=x", store, "")
    thread = threading.Thread(target=upload._parse, args=[HEAD])
    thread.start()
    assert began.wait(20)
    upload.close()  # does not wait
    go.set()
    thread.join(20)
    deadline = time.monotonic() + 20
    while list((tmp_path / "files").iterdir()) or store._counted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert upload._out is None and store._number.held("") == 0
