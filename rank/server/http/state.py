"""What all requests share."""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Any

from ..batch.stored import StoredBatches
from ..config import ServerConfig
from ..conversation_store import ConversationStore
from ..file_store import FileStore
from ..mcp import config as mcp_config
from ..mcp.tool_servers import ToolServers
from ..models import Models
from ..response_store import ResponseStore
from ..text_engine import TextEngine
from .access import Access
from .metrics import Metrics


class Used:
    """What one API key has used."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.open = 0  # requests that are being answered

    def close(self) -> None:
        """A request is not open any more."""
        self.open -= 1

    def add(self, prompt_tokens: int, completion_tokens: int) -> None:
        """A request that had tokens is over."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


class ServerState:
    def __init__(self, sessions: TextEngine, config: ServerConfig, models: Models | None = None):
        self.models = models  # where there are several; `sessions` is the first one's
        self.sessions = sessions
        self.config = config
        self.access = Access(config)
        self.keys = [key.encode() for key in config.api_keys]
        # Known again after a restart, by keys whose order may have changed.
        self.owners = [blake2b(key, digest_size=16).hexdigest() for key in self.keys] or [""]
        self.used = [Used() for _ in self.keys or [b""]]  # one where there are no keys
        self.link = sessions.link
        self.metrics = Metrics(sessions.link, sessions.names[0])
        self.responses = ResponseStore(config.response_store)
        self.conversations = ConversationStore(config.conversation_store)
        self.batches: StoredBatches | None = None  # None: without --file-store
        if config.file_store:
            self.batches = StoredBatches(FileStore(config.file_store), sessions, self._used_by, self.metrics.ended)
        self.tools = ToolServers(mcp_config.read(config.mcp_config) if config.mcp_config else [])
        self.started = int(time.time())
        self.held = 0  # bytes of large bodies whose requests have not begun yet
        self.read_until = 0.0  # on the clock of time.monotonic: when what was read of large bodies is paid for
        self.active: dict[Any, None] = {}  # handlers of requests that are being answered

    def _used_by(self, owner: str, prompt_tokens: int, completion_tokens: int) -> None:
        if owner in self.owners:  # else its key is no longer among the server's
            self.used[self.owners.index(owner)].add(prompt_tokens, completion_tokens)
