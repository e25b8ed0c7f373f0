"""The settings, apart from the requests, that answers depend on."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from ...checkpoint_files import config_bytes
from ..config import ServerConfig
from .weights_fingerprint import fingerprint


def setup(config: ServerConfig) -> dict[str, Any]:
    """Equal at each start of a batch that may go on. Raises FatalError for broken weights."""
    digest = blake2b(config_bytes(Path(config.model_dir)), digest_size=8).hexdigest()
    sampling = {name: value for name, value in msgspec.to_builtins(config.sampling).items() if value is not None}
    return {
        "the model": config.names()[0],
        "the model's config.json": digest,
        "the fingerprint of the model's weights": fingerprint(config.model_dir),
        "the sampling": sampling,
        "--generation-config": "auto" if config.generation_config else "none",  # the words of journals that are there
        "--chat-template": config.chat_template,
        "--tool-call-parser": config.tool_call_parser,
        "--reasoning-parser": config.reasoning_parser,
        "--thinking": config.thinking,
    }
