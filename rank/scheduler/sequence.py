"""One sequence as the lead sees it: its tokens, its blocks, and how far it has been computed."""

from __future__ import annotations

from ..protocol import Request, unpack_u32
from .blocks import Hash, extend_chain


class Sequence:
    """`num_computed` runs after `length`; what lies between is to be computed, whether prompt or output.

    `length` counts tokens whose ids are still on their way from the device: a step is planned before the one before it
    has been read back. Only `tokens` are known here.
    """

    def __init__(self, request: Request, arrival: int, hashes: list[Hash]):
        self.id = request.id
        self.sampling = request.sampling
        self.order = (request.priority, arrival)  # who goes first
        self.salt = request.cache_salt
        self.tokens: list[int] = unpack_u32(request.tokens).tolist()
        self.prompt_len = len(self.tokens)
        self.row = -1  # its place in the ranks' batch state; -1 while it waits
        self.blocks: list[int] = []
        self.num_computed = 0
        self.in_flight = 0  # sampled tokens whose ids have not arrived
        self.sampled_at = 0  # the step that sampled its newest token
        self.hashes = hashes  # of the known tokens' full blocks, as far as anybody asked
        self.published = 0  # leading blocks that were offered to the prefix cache
        self.expected = 0  # tokens that it will probably find in the prefix cache; 0 from its admission on
        self.cached_tokens = -1  # of the prompt; -1 until first admitted
        self.reported = False  # its first delta has gone out
        self.finished = False

    @property
    def length(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def num_outputs(self) -> int:
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.num_computed

    @property
    def ends_by_length(self) -> bool:
        """Its last allowed token has been sampled, though perhaps not read back."""
        return self.num_outputs >= self.sampling.max_tokens

    def extend_hashes(self, block_size: int) -> None:
        """Hash the known tokens' full blocks that are not hashed yet."""
        extend_chain(self.hashes, self.tokens, block_size, self.salt)
