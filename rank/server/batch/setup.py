"""What answers depend on besides the requests."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import msgspec

from ..config import ServerConfig
from .weights_fingerprint import fingerprint


def setup(config: ServerConfig) -> dict[str, Any]:
    """Equal at each start of a batch that may go on. Raises FatalError for broken weights."""
    with open(os.path.join(config.model_dir, "config.json"), "rb") as file:
        digest = blake2b(file.read(), digest_size=8).hexdigest()
    sampling = {name: value for name, value in msgspec.to_builtins(config.sampling).items() if value is not None}
    return {
        "the model": config.names()[0],
        "the model's config.json": digest,
        "the fingerprint of the model's weights": fingerprint(config.model_dir),
        "the sampling": sampling,
        "--generation-config": config.generation_config,
        "--chat-template": config.chat_template,
        "--thinking": config.thinking,
    }
