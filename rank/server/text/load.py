"""All of a model directory or GGUF file that concerns text: tokenizer, template, generation defaults, end tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from ... import protocol
from ..api_error import ApiError
from . import tekken, tokenizer_file
from .control import Marker
from .output_parser import KNOWN_REASONING, ReasoningFormat
from .template import ChatTemplate, load_template
from .tokenizer import Tokenizer
from .tokenizer_file import read_json
from .tool_formats import ToolCallFormat, choose

POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class Text:
    """Read once, in a thread of its own: a large tokenizer takes a second."""

    def __init__(self, model_dir: str, generation_config: str = "auto", chat_template: str = ""):
        self._vocabulary: protocol.Vocabulary | None = None
        directory = Path(model_dir)
        tokenizer = tokenizer_file.find(directory)
        ends = tekken.ENDS if tokenizer.name == tekken.NAME else {}
        tokenizer_config = ends | read_json(directory, "tokenizer_config.json")
        self.template: ChatTemplate | None = load_template(directory, tokenizer_config, chat_template)
        source = self.template.source if self.template else ""
        self.tool_format: ToolCallFormat | None = choose(source)
        calls = (*self.tool_format.opens, *self.tool_format.markers) if self.tool_format else ()
        self.tokenizer = Tokenizer(tokenizer, source, {*calls, *itertools.chain(*KNOWN_REASONING)})
        if generation_config == "auto":
            self.generation = read_json(directory, "generation_config.json")
        elif generation_config == "none":
            self.generation = {}
        else:
            self.generation = json.loads(Path(generation_config).read_text(encoding="utf-8"))
        self.end_tokens = self._find_end_tokens(directory, tokenizer_config)
        self.pooling = _pooling(directory)
        self.reasoning = self._find_reasoning(source)
        self.marker = Marker(self.tokenizer.control)
        self.answer_marker = Marker(self.tokenizer.control - {*(self.reasoning or ()), *calls})

    def vocabulary(self, size: int) -> protocol.Vocabulary:
        """What rank 0 needs to know of the tokenizer; made once. Raises ApiError 400 where grammars cannot have it."""
        if not self.tokenizer.bytewise:
            raise ApiError(400, "answers of this model cannot be constrained: its tokens do not stand for fixed bytes")
        if self._vocabulary is None or self._vocabulary.size != size:
            ends = tuple(token for token in self.end_tokens if token < size)
            self._vocabulary = protocol.Vocabulary(self.tokenizer.to_json(), size, ends)
        return self._vocabulary

    def _find_end_tokens(self, directory: Path, tokenizer_config: dict) -> tuple[int, ...]:
        """generation_config.json's, else config.json's; and the tokenizer's, which chat models end their turn with."""
        listed = read_json(directory, "generation_config.json").get("eos_token_id")
        if listed is None:
            config = read_json(directory, "config.json")
            listed = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        ids = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
        token = tokenizer_config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        family = self.template.family if self.template else None
        own = [self.tokenizer.token_id(one) for one in (token, family.end if family else None) if one]
        return tuple(dict.fromkeys([*ids, *(id for id in own if id is not None)]))

    def _find_reasoning(self, source: str) -> ReasoningFormat | None:
        for markers in KNOWN_REASONING:
            if markers.close in source or {*markers} <= self.tokenizer.added.keys():
                return markers
        return None


def _pooling(directory: Path) -> str:
    """How a model that is made for embeddings pools: what sentence-transformers writes, mean, last, or the names of
    other ways, which are not supported. Of others the mean is taken."""
    said = read_json(directory / "1_Pooling", "config.json")
    modes = [POOLINGS.get(name, name) for name, on in said.items() if name.startswith("pooling_mode_") and on is True]
    return " and ".join(modes) or "mean"
