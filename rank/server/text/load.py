"""All of a model directory or GGUF file that concerns text: tokenizer, template, generation defaults, end tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ... import protocol
from ..api_error import ApiError
from . import reasoning, tekken, tokenizer_file, tool_formats
from .control import Marker
from .end_tokens import family_ends, inner_ends
from .message_shape import TOOLS, MessageShape, find_shape
from .model_files import read_json, sampling_defaults
from .reasoning import ReasoningFormat
from .template import ChatTemplate, load_template
from .tokenizer import Tokenizer, TokenTable
from .tool_formats import ToolCallFormat

POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last", "pooling_mode_cls_token": "cls"}


P = ParamSpec("P")
R = TypeVar("R")


class TextSettings(NamedTuple):
    """Places of a model's text files, and the options that concern them."""

    model_dir: str
    generation_config: bool = True
    chat_template: str = ""  # the path of a template that replaces the model's
    # Names of formats; "auto": what template, tokenizer and model type tell; "none": no format.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    vocab_size: int | None = None  # the model's, where the tokenizer has more tokens


class ModelText:
    """A model's text files, as all that answers requests sees them."""

    tokenizer: TokenTable
    generation: dict[str, Any]  # generation_config.json
    end_tokens: tuple[int, ...]
    pooling: str
    tool_format: ToolCallFormat | None
    reasoning: ReasoningFormat | None
    chats: bool  # it has a chat template ...
    takes_tools: bool  # ... which shows the model tools
    family: str  # whose template it is, where the model has none of its own

    def __init__(self) -> None:
        self._vocabulary: protocol.Vocabulary | None = None
        self._making = threading.Lock()  # of that: rank 0 drops what it compiles for one when another comes

    def run(self, function: Callable[Concatenate[Text, P], R], *args: P.args, **options: P.kwargs) -> R:
        """Call a function of a module with the complete Text and these arguments."""
        raise NotImplementedError

    def within(self, vocab_size: int) -> ModelText:
        """The text of a model with so few tokens: some have fewer than their tokenizer.

        Takes about a second where that is so, but only once.
        """
        raise NotImplementedError

    def vocabulary(self, size: int) -> protocol.Vocabulary:
        """The tokenizer's facts that rank 0 needs; made once. Raises ApiError 400 where grammars cannot have it."""
        if not self.tokenizer.bytewise:
            raise ApiError(400, "answers of this model cannot be constrained: its tokens do not stand for fixed bytes")
        with self._making:
            if self._vocabulary is None or self._vocabulary.size != size:
                ends = tuple(token for token in self.end_tokens if token < size)
                self._vocabulary = protocol.Vocabulary(self.run(grammar_tokenizer), size, ends)
            return self._vocabulary


class Text(ModelText):
    """All of it in this process. Takes a second for a large tokenizer."""

    def __init__(
        self,
        model_dir: str,
        generation_config: bool = True,
        chat_template: str = "",
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        vocab_size: int | None = None,
    ):
        """The arguments are those of TextSettings."""
        super().__init__()
        given = (model_dir, generation_config, chat_template, tool_call_parser, reasoning_parser)
        self._cut = functools.cache(lambda size: Text(*given, vocab_size=size))
        directory = Path(model_dir)
        tokenizer = tokenizer_file.find(directory)
        ends = tekken.ENDS if tokenizer.name == tekken.NAME else {}
        tokenizer_config = ends | read_json(directory, "tokenizer_config.json")
        self.template: ChatTemplate | None = load_template(directory, tokenizer_config, chat_template)
        self._shapes = {tools: self._find_shape(tools) for tools in (False, True)}
        source = self.template.source if self.template else ""
        self.chats = self.template is not None
        self.takes_tools = self.template is not None and self.template.takes_tools
        self.family = self.template.family.family if self.template and self.template.family else ""
        self.tool_format = self._find_tool_format(tool_call_parser, source, read_json(directory, "config.json"))
        calls = (*self.tool_format.opens, *self.tool_format.markers) if self.tool_format else ()
        known = [marker for name in reasoning.names() for marker in reasoning.find(name).markers]
        self.tokenizer: Tokenizer = Tokenizer(tokenizer, source, {*calls, *known}, vocab_size)
        self.generation = sampling_defaults(directory) if generation_config else {}
        self.end_tokens = self._find_end_tokens(directory, tokenizer_config)
        self.pooling = _pooling(directory)
        self.reasoning = self._find_reasoning(reasoning_parser, source)
        self.marker = Marker(self.tokenizer.control)
        self.answer_marker = Marker(
            self.tokenizer.control - {*(self.reasoning.markers if self.reasoning else ()), *calls}
        )

    def shape(self, tools: Sequence[Any] | None) -> MessageShape:
        """How the template takes the messages of a request with these tools."""
        return self._shapes[bool(tools)]

    def _find_shape(self, tools: bool) -> MessageShape:
        template = self.template
        if template is None or (tools and not template.takes_tools):
            return MessageShape()
        return find_shape(lambda messages: template.render(messages, TOOLS if tools else None))

    def within(self, vocab_size: int) -> Text:
        return self if self.tokenizer.end <= vocab_size else self._cut(vocab_size)

    def run(self, function: Callable[Concatenate[Text, P], R], *args: P.args, **options: P.kwargs) -> R:
        return function(self, *args, **options)

    def _find_end_tokens(self, directory: Path, tokenizer_config: dict) -> tuple[int, ...]:
        """generation_config.json's, else config.json's; the tokenizer's, which chat models end their turn with; and all
        that its family has."""
        listed = read_json(directory, "generation_config.json").get("eos_token_id")
        if listed is None:
            config = read_json(directory, "config.json")
            listed = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        ids = [] if listed is None else list(listed) if isinstance(listed, list) else [listed]
        token = tokenizer_config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token or None
        family = self.template.family if self.template else None
        added = self.tokenizer.added
        texts = token, family.end if family else None, *family_ends(added)
        own = [self.tokenizer.token_id(one) for one in texts if one]
        inner = [added[one] for one in inner_ends(added)]
        return tuple(dict.fromkeys(id for id in (*ids, *own) if id is not None and id not in inner))

    def _find_tool_format(self, name: str, source: str, config: dict) -> ToolCallFormat | None:
        """A model that takes tools and whose format is not known may write JSON as most do."""
        if name != "auto":
            return None if name == "none" else tool_formats.find(name)
        found = tool_formats.choose(source, config.get("model_type") or "")
        if found is None and self.takes_tools:
            return tool_formats.find("json")
        return found

    def _find_reasoning(self, name: str, source: str) -> ReasoningFormat | None:
        if name != "auto":
            return None if name == "none" else reasoning.find(name)
        return reasoning.choose(source, self.tokenizer.added.keys())


def grammar_tokenizer(text: Text) -> str:
    """The tokenizer as rank 0 takes it, for grammars."""
    return text.tokenizer.to_json()


def _pooling(directory: Path) -> str:
    """How a model that is made for embeddings pools: what sentence-transformers writes, mean, last, cls, or the names
    of other ways, which are not supported. Of others the mean is taken."""
    said = read_json(directory, "1_Pooling/config.json")
    modes = [POOLINGS.get(name, name) for name, on in said.items() if name.startswith("pooling_mode_") and on is True]
    return " and ".join(modes) or "mean"
