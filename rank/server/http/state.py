"""The state that all requests share."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ....errors import USAGE
from .. import tls, tracing
from ..batch.stored import StoredBatches
from ..blocking import on_disk
from ..config import ServerConfig
from ..conversation_store import ConversationStore
from ..file_store import LOCK_PATIENCE, FileStore, StoreInUse, require_locks
from ..handover import Handover
from ..kept_files import KeptFiles
from ..mcp import config as mcp_config
from ..mcp.tool_servers import ToolServers
from ..models import Models
from ..registration import gave_files_up
from ..response_store import ResponseStore
from ..shares import Budget
from ..sleeper import Sleeper
from ..text_engine import TextEngine
from .access import Access
from .metrics import Metrics

log = logging.getLogger(__name__)
KEPT_BYTES = 1 << 30  # of responses, and of conversations, that are in files
TAKE_EVERY = 0.3  # seconds between two tries to take the files over
UPLOAD_PATIENCE = 15.0  # seconds for uploads that are under way when the files are given up
MAX_BODY = 64 << 20  # bytes
# Bytes of bodies, tools' results and log probabilities of all requests that are being answered: as objects in memory
# they take a few times as much.
LIVE_BYTES = 512 << 20
LIVE_FLOOR = 64 << 20  # that each key may have, however many keys there are


class Used:
    """The usage of one API key."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.open = 0  # requests that are being answered
        self.ahead = 0  # sequences of these that go before others, by a priority below 0

    def close(self, ahead: int) -> None:
        """A request is not open any more. ahead: its sequences that went before others."""
        self.open -= 1
        self.ahead -= ahead

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """A request that had tokens is over."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


class ServerState:
    def __init__(self, engine: TextEngine, config: ServerConfig, models: Models | None = None):
        self.models = models  # where there are several; `engine` is the first one's
        self.engine = engine
        self.config = config
        self.access = Access(config)
        self.keys = [key.encode() for key in config.api_keys]
        # Known again after a restart, by keys whose order may have changed.
        self.owners = [blake2b(key, digest_size=16).hexdigest() for key in self.keys] or [""]
        self.used = [Used() for _ in self.keys or [b""]]  # one where there are no keys
        self.requests_per_key = config.requests_per_key  # 0: no limit; `serve` sets one where there are several keys
        self.link = engine.link
        end = tls.expiry(tls.certificate(config.tls_cert)) if config.tls_cert else None
        self.sleeper = Sleeper(engine.link, config.load_options)
        self.metrics = Metrics(engine.link, engine.names[0], end)
        self.tracing = self.metrics.tracing = tracing.start(config.otlp_endpoint, "phalanx")
        keys = len(self.used)
        self.responses = ResponseStore(config.response_store, keys, self.owners)
        self.conversations = ConversationStore(config.conversation_store, self.owners)
        self._before = ""  # the registry's file of the job before this one
        self._released = False  # the files of --file-store were given up
        if config.file_store and config.handover is not None:
            self._share_with_successors(config)
        self.batches: StoredBatches | None = None  # None: without --file-store
        if config.file_store and config.handover is None:
            self.batches = self.metrics.batches = self._stored(LOCK_PATIENCE)
        self.handover: Handover | None = None
        self.tools = ToolServers(mcp_config.read(config.mcp_config) if config.mcp_config else [])
        self.started = int(time.time())
        self.live = Budget(LIVE_BYTES, keys, LIVE_FLOOR)
        # Bytes of large bodies whose requests have not begun yet. One of each key may always be as large as it can.
        self.coming = Budget(MAX_BODY * min(2, keys), keys, MAX_BODY)
        self.read_until = 0.0  # on the clock of time.monotonic: when what was read of large bodies is paid for
        self.active: dict[Any, None] = {}  # handlers of requests that are being answered

    def _share_with_successors(self, config: ServerConfig) -> None:
        """Keep responses and conversations in files, too."""
        if config.predecessor:
            self._before = f"{os.path.dirname(config.registry_file)}/{config.predecessor}.json"
        root, before = Path(config.file_store), self._before
        self.responses.maker = config.registry_file
        kept = partial(KeptFiles, most_bytes=KEPT_BYTES, predecessor=before, keys=len(self.used))
        self.responses.files = kept(root / "responses", config.response_store)
        self.conversations.files = kept(root / "conversations", config.conversation_store)
        require_locks(config.file_store)

    async def written(self, seconds: float) -> None:
        """Wait until what is kept for the job's successors is in files, for so long at most."""
        files = [store.files for store in (self.responses, self.conversations) if store.files is not None]
        if not all(await asyncio.gather(*(one.flush(seconds) for one in files))):
            log.warning("the last responses or conversations are not in --file-store: its disk is too slow")

    def _stored(self, patience: float) -> StoredBatches:
        """The files and batches of --file-store. Raises FatalError: StoreInUse where another server has them."""
        keys = len(self.used)
        files = FileStore(self.config.file_store, keys, patience, locked=self.config.handover is not None)
        return StoredBatches(files, self.engine, self._used_by, self.metrics.ended, keys)

    async def take_files(self) -> None:
        """Waits for the job before this one to give its files up, and goes on with its batches."""
        told = 0.0
        while self.batches is None and not self._released:
            try:
                self.batches = self.metrics.batches = await on_disk(self._take)
            except StoreInUse as busy:
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    log.info("%s; waiting for it", busy)
                await asyncio.sleep(TAKE_EVERY)
        if self.batches is None:
            return
        if self._released:  # meanwhile
            await self.release_files()
        else:
            self.batches.start()

    def _take(self) -> StoredBatches:
        """The files and batches, once the job before this one has given them up. Raises FatalError, as `_stored` does.

        That job's file is asked, too, as on some file systems a lock is seen on its own node only.
        """
        if self._before and not gave_files_up(Path(self._before), socket.gethostname()):
            raise StoreInUse(f"--file-store {self.config.file_store}: job {self.config.predecessor} uses it", USAGE)
        return self._stored(0.0)

    @property
    def has_files(self) -> bool:
        """Whether this server writes the files of --file-store."""
        return self.batches is not None and self.batches.files.held

    async def release_files(self) -> None:
        """Gives the files up for the next job: uploads come to their end, batches stop where they are."""
        self._released = True
        batches = self.batches
        if batches is None:
            return
        await batches.stop()
        until = time.monotonic() + UPLOAD_PATIENCE
        while batches.files.writing and time.monotonic() < until:
            await asyncio.sleep(0.05)
        batches.files.close()

    def _used_by(self, owner: str, prompt_tokens: int, completion_tokens: int) -> None:
        if owner in self.owners:  # else its key is no longer among the server's
            self.used[self.owners.index(owner)].add(prompt_tokens, completion_tokens)
