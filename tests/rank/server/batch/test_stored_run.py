"""A run whose batch lies on the server, cancelled at the worst moment."""

import asyncio
import threading
from types import SimpleNamespace

from phalanx.rank.server.batch import journal, stored_run


def test_a_journal_that_a_thread_still_opens_is_closed_too(tmp_path, monkeypatch):
    opening, go_on = threading.Event(), threading.Event()

    def slow(*args):
        opening.set()
        assert go_on.wait(20)
        return journal.Journal(*args)

    async def cancelled(run):
        task = asyncio.ensure_future(run.run())
        await asyncio.to_thread(opening.wait, 20)
        task.cancel()
        asyncio.get_running_loop().call_soon(go_on.set)
        await asyncio.wait([task], timeout=20)
        assert task.cancelled()
        run.close(remove=False)

    (tmp_path / "input").write_text("")
    monkeypatch.setattr(stored_run, "Journal", slow)
    engine = SimpleNamespace(link=None)
    place = tmp_path / "input", tmp_path / "journal"
    asyncio.run(cancelled(stored_run.StoredRun(*place, engine, lambda _: None, lambda _: None, lambda _: True, "")))
    monkeypatch.setattr(journal, "LOCK_PATIENCE", 0)
    journal.Journal(str(tmp_path / "journal"), str(tmp_path / "input"), {}).close()
