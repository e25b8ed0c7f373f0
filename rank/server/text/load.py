"""All of a model directory or GGUF file that concerns text: tokenizer, template, generation defaults, end tokens."""

from __future__ import annotations

from pathlib import Path

from ... import protocol
from ..api_error import ApiError
from . import reasoning, tekken, tokenizer_file, tool_formats
from .control import Marker
from .reasoning import ReasoningFormat
from .template import ChatTemplate, load_template
from .tokenizer import Tokenizer
from .tokenizer_file import read_json
from .tool_formats import ToolCallFormat

POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}


class Text:
    """Read once, in a thread of its own: a large tokenizer takes a second."""

    def __init__(
        self,
        model_dir: str,
        generation_config: bool = True,
        chat_template: str = "",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
    ):
        """The parsers are names of formats; "auto": what template, tokenizer and model type tell; "none": no format."""
        self._vocabulary: protocol.Vocabulary | None = None
        directory = Path(model_dir)
        tokenizer = tokenizer_file.find(directory)
        ends = tekken.ENDS if tokenizer.name == tekken.NAME else {}
        tokenizer_config = ends | read_json(directory, "tokenizer_config.json")
        self.template: ChatTemplate | None = load_template(directory, tokenizer_config, chat_template)
        source = self.template.source if self.template else ""
        self.tool_format = self._find_tool_format(tool_call_parser, source, read_json(directory, "config.json"))
        calls = (*self.tool_format.opens, *self.tool_format.markers) if self.tool_format else ()
        known = [marker for name in reasoning.names() for marker in reasoning.find(name).markers]
        self.tokenizer = Tokenizer(tokenizer, source, {*calls, *known})
        self.generation = read_json(directory, "generation_config.json") if generation_config else {}
        self.end_tokens = self._find_end_tokens(directory, tokenizer_config)
        self.pooling = _pooling(directory)
        self.reasoning = self._find_reasoning(reasoning_parser, source)
        self.marker = Marker(self.tokenizer.control)
        self.answer_marker = Marker(
            self.tokenizer.control - {*(self.reasoning.markers if self.reasoning else ()), *calls}
        )

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

    def _find_tool_format(self, name: str, source: str, config: dict) -> ToolCallFormat | None:
        """A model that takes tools and whose format is not known may write JSON as most do."""
        if name != "auto":
            return None if name == "none" else tool_formats.find(name)
        found = tool_formats.choose(source, config.get("model_type") or "")
        if found is None and self.template is not None and self.template.takes_tools:
            return tool_formats.find("json")
        return found

    def _find_reasoning(self, name: str, source: str) -> ReasoningFormat | None:
        if name != "auto":
            return None if name == "none" else reasoning.find(name)
        return reasoning.choose(source, self.tokenizer.added.keys())


def _pooling(directory: Path) -> str:
    """How a model that is made for embeddings pools: what sentence-transformers writes, mean, last, cls, or the names
    of other ways, which are not supported. Of others the mean is taken."""
    said = read_json(directory / "1_Pooling", "config.json")
    modes = [POOLINGS.get(name, name) for name, on in said.items() if name.startswith("pooling_mode_") and on is True]
    return " and ".join(modes) or "mean"
