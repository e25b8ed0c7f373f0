"""One sequence in the scheduler: its tokens, its blocks and how much of it is computed."""

from __future__ import annotations

from ..protocol import NewSequence, Request, pack_u32, unpack_u32
from .blocks import NONE, Hash, extend_chain
from .grammar import Grammar


class Sequence:
    """The tokens between `num_computed` and `length` are still to be computed, whether prompt or output.

    `length` includes sampled tokens whose ids have not arrived from the device: a step is planned before the result of
    the previous one is read. `tokens` has the known ids only.
    """

    def __init__(self, request: Request, arrival: int, hashes: list[Hash], grammar: Grammar | None = None):
        self.id = request.id
        self.grammar = grammar  # what its output must be; None: it is free
        self.sampling = request.sampling
        self.order = (request.priority, arrival)  # of scheduling: lower goes first
        self.salt = request.cache_salt
        self.tokens: list[int] = unpack_u32(request.tokens).tolist()
        self.prompt_len = self.length = len(self.tokens)
        self.max_length = self.prompt_len + self.sampling.max_tokens
        self.row = -1  # its row in the workers' BatchState; -1 while it waits
        self.tables: list[list[int]] = []  # its blocks, of each cache group
        self.room = 0  # tokens for which it has blocks
        self.num_computed = 0
        self.sampled_at = 0  # the step that sampled its newest token
        self.hashes = hashes  # of the known tokens' full blocks, as far as they were needed
        self.num_cached_blocks = 0  # hashes whose blocks were passed to Blocks.cache_full
        self.borders: list[int] = []  # tokens after which it leaves a state snapshot: no chunk goes beyond
        self.expected = 0  # tokens that the prefix cache will probably have; 0 once it is admitted
        self.cached_tokens = -1  # prompt tokens found in the prefix cache; -1 until first admitted
        self.towered = 0  # images that the tower worked on for it
        self.admitted = 0.0  # when that was, by time.monotonic()
        self.prediction: list[int] = unpack_u32(request.prediction).tolist()
        self.awaited = False  # a step in flight verifies or makes drafts of it: its output is needed first
        self.pictures = request.pictures
        self.pixels = {one.digest: one for one in request.pixels}  # until it ends: it may be preempted
        self.reported = False  # its first delta has been sent
        self.finished = False

    @property
    def in_flight(self) -> int:
        """Sampled tokens whose ids have not arrived yet."""
        return self.length - len(self.tokens)

    @property
    def awaits_mask(self) -> bool:
        """Whether no step may be planned that samples it, before the mask of what may follow is there.

        Where masks come in time, a step is planned before its tokens, and so its mask, are known.
        """
        grammar = self.grammar
        return grammar is not None and not (grammar.planned_ahead if self.in_flight else grammar.ready)

    def ends_with(self, token: int, outputs: int) -> bool:
        """Whether this token, the output's number `outputs`, is a stop token that ends it."""
        return token in self.sampling.stop_token_ids and outputs > self.sampling.min_tokens

    def over_before(self) -> bool:
        """Whether no token could follow the one before its newest: the newest counts for nothing."""
        grammar = self.grammar
        return grammar is not None and bool(grammar.over) and grammar.ended_at < len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.num_computed

    @property
    def ends_by_length(self) -> bool:
        """Whether its last allowed token has been sampled; the id may not have arrived yet."""
        return self.length >= self.max_length

    def introduced(self) -> NewSequence:
        """The facts of it that ranks need, once it has a row and blocks."""
        return NewSequence(
            row=self.row,
            tokens=pack_u32(self.tokens),
            prompt_len=self.prompt_len,
            num_computed=self.num_computed,
            blocks=_packed(self.tables[0]),
            sampling=self.sampling,
            constrained=self.grammar is not None,
            further_blocks=[_packed(table) for table in self.tables[1:]],
            pictures=self.pictures,
        )

    def usable_blocks(self, block_size: int) -> int:
        """Full blocks at its beginning that may come from the prefix cache."""
        scored = self.sampling.prompt_logprobs >= 0 and not self.reported
        if scored or self.sampling.pooling in ("mean", "cls"):  # they need all hidden states, and the cache keeps none
            return 0
        return (len(self.tokens) - 1) // block_size  # the last token is always computed: its logits are needed

    def chunk(self, computed: int, most: int) -> int:
        """Tokens of its next chunk, up to `most`, where so many are computed. It has more where it would end within
        tokens that attend to each other."""
        if computed + 1 >= self.length:  # it decodes
            return most
        count = min([most, *(border - computed for border in self.borders if border > computed)])
        spans = (span for picture in self.pictures for span in picture.spans)
        return next((end - computed for first, end in spans if first < computed + count < end), count)

    def extend_hashes(self, block_size: int) -> None:
        """Hash those full blocks of the known tokens that are not hashed yet."""
        extend_chain(self.hashes, self.tokens, block_size, self.salt, self.pictures)


def _packed(table: list[int]) -> bytes:
    """A block table; any block stands for unused ones."""
    return pack_u32([0 if block == NONE else block for block in table] if NONE in table else table)
