"""The data that crosses process borders: requests, plans and deltas, and how they are written as bytes.

Two wires use these types and nothing else:

* server <-> rank 0, a unix socket of this host: frames of a 4-byte little-endian length and one msgpack message,
  `FromServer` in one direction and `ToServer` in the other;
* scheduler -> every rank of a replica, a broadcast of one `Plan` for each step, and of `Masks` for those that need
  them; of replicas without rank 0 a `StepOutput` comes back for each.

Token ids, block ids and rows travel as packed little-endian integers inside msgpack `bin` fields: a plan for 256
decoding sequences has to fit in one eager MPI message (4000 bytes).
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

MAX_DRAFTS = 7  # of a sequence in a step
NO_DRAFT = -1  # equals no sampled token
MADE = -2  # a draft that the ranks' model has made, and the ranks have kept
FRAME = struct.Struct("<I")
MAX_FRAME = 256 << 20


def pack_u32(values) -> bytes:
    """Integers below 2**32 as little-endian bytes."""
    return array("I", values).tobytes()


def unpack_u32(data: bytes) -> array:
    return array("I", data)


def pack_i32(values) -> bytes:
    """Integers of 32 bits as little-endian bytes."""
    return array("i", values).tobytes()


def pack_u16(values) -> bytes:
    return array("H", values).tobytes()


def unpack_u16(data: bytes) -> array:
    return array("H", data)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one sequence is sampled and when it ends. The server has resolved all defaults and checked all ranges."""

    max_tokens: int  # at least 1; prompt + max_tokens fits the model's context
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, CTRL)
    repeat_last_n: int = 0  # given: the repetition penalty looks at the last so many tokens only
    presence_penalty: float = 0.0  # over output only, as OpenAI documents them
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: the server process draws one where the request has none
    logprobs: int = -1  # -1 none, 0 the sampled token's only, n > 0 also the n most likely tokens'
    prompt_logprobs: int = -1  # the same of the prompt's tokens
    logprob_token_ids: tuple[int, ...] = ()  # given: of these instead of the most likely ones
    allowed_token_ids: tuple[int, ...] = ()  # given: no others are sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output never has
    thinking_budget: int = -1  # most tokens of thoughts, which are closed then; -1: any number
    thinking_tokens: tuple[int, int] = (-1, -1)  # that open and close thoughts
    thinking: bool = False  # the prompt has opened them
    stop_token_ids: tuple[int, ...] = ()  # the model's own end tokens included unless ignore_eos
    min_tokens: int = 0  # stop_token_ids cannot be sampled before this many tokens
    # The model's heads that choose the sequence's tokens, in turn, as Model.choose numbers them; (): the vocabulary's
    # alone. Their tokens may lie beyond the vocabulary. Only max_tokens and stop_token_ids count then.
    heads: tuple[int, ...] = ()
    pooling: str = ""  # "mean", "last" or "cls": its embedding is wanted; max_tokens is 1, and the token means nothing


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """An image's place in a prompt."""

    digest: bytes  # of its pixels
    start: int  # its first token
    length: int  # of its tokens, those that only frame its rows included
    rows: int  # of the tokens that its features stand for
    columns: int
    spans: tuple[tuple[int, int], ...] = ()  # (first, end) of tokens of the prompt that attend to each other


class Pixels(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """An image, in the size in which the model takes it. To the ranks it goes before the plan that needs it."""

    digest: bytes
    height: int
    width: int
    data: bytes  # u8, [height, width, 3]; empty where it goes to all ranks: one of them gets the pixels
    dropped: list[bytes] = []  # digests of images that no later plan needs: the ranks forget their features
    text: bytes = b""  # u32: tokens that the tower reads with the image; the digest is of both
    # The rank that gets the pixels and makes the features, counted from the end of its replica's, whose last ranks are
    # the first pipeline stage: -1 is the last.
    rank: int = -1


class Request(msgspec.Struct, frozen=True, tag="request"):
    """One sequence to continue. n > 1 is n requests."""

    id: str
    tokens: bytes  # the prompt's token ids, u32
    sampling: SamplingParams
    priority: int = 0  # lower goes first
    cache_salt: str = ""  # prefix-cache blocks are shared only between equal salts
    grammar: str = ""  # of llguidance: the output is one of its texts
    owner: str = ""  # whose it is, where it has a grammar: those of one owner share a process
    prediction: bytes = b""  # tokens, u32, that the client thinks that the output will have
    pictures: list[Picture] = []  # images in the prompt, in its order ...
    pixels: list[Pixels] = []  # ... and what they show, each once


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The vocabulary that grammars are compiled for. Sent before the first request that has one."""

    tokenizer: str  # tokenizer.json's text
    size: int  # of the model's vocabulary
    ends: tuple[int, ...]  # tokens that end an answer: grammars allow them where they accept


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client went away, or a stop string was found: free these sequences. No further delta is owed."""

    ids: list[str]


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what was accepted, then end the ranks with this exit code. The server sends no request after this."""

    code: int = 0


class Switch(msgspec.Struct, frozen=True, tag="switch"):
    """Serve another model, or none. The server sends it when no sequence is open, and no request before the answer."""

    model: int  # its number among the server's; Ready repeats it
    options: str  # rank/options.py's Options as JSON; "": unload what is loaded, and wait
    weights: str = ""  # "keep" what is unloaded in host memory; or bring the "only" weights back, and wait


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The sender runs. Both ends of the link send it every few seconds, also while nothing else is to be sent."""


def heartbeat_period(timeout: float) -> float:
    """Seconds between heartbeats, for a peer that gives up after `timeout` seconds of silence."""
    return min(5.0, timeout / 8)


ToScheduler = Request | Vocabulary | Abort | Drain | Switch
FromServer = ToScheduler | Heartbeat


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    logprob: float
    top: list[tuple[int, float]]  # most likely first


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The addition of one step to one sequence."""

    id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    finish: str = ""  # "", "stop", "length" or "error"
    stop_token: int = -1  # the stop token id that ended it; it is not among `tokens`
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; in the first delta
    admitted: float = 0.0  # when it got a row first, by time.monotonic(), which this host's processes share; as above
    drafted: int = 0  # drafts of its tokens that the step has verified
    accepted: int = 0  # and of these those that were right, up to its end
    embedding: bytes = b""  # f32, little-endian
    prompt_logprobs: list[TokenLogprob] = []  # of the prompt's tokens but the first; in the first delta
    error: str = ""  # for finish == "error": what to tell the client
    status: int = 0  # and its HTTP status


class Stats(msgspec.Struct, frozen=True):
    """The engine's counters and gauges, for /metrics and the log line."""

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0  # held by sequences
    blocks_cached: int = 0  # free, but still holding a reusable prefix
    steps: int = 0
    prompt_tokens: int = 0  # counted once a request's prompt is computed, cached ones included
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swapped_in: int = 0  # preempted sequences whose blocks came back from host memory
    host_blocks_total: int = 0
    host_blocks_used: int = 0
    host_stores: int = 0  # blocks copied to host memory
    host_loads: int = 0  # and back
    snapshots_total: int = 0  # of sequences' states
    snapshots_used: int = 0
    snapshot_saves: int = 0
    snapshot_loads: int = 0  # sequences that began with one
    experts_resident: int = 0  # on rank 0: experts that layers' steps have used, by how those in host memory are served
    experts_cpu: int = 0
    experts_streamed: int = 0
    experts_loaded: int = 0  # experts that became resident
    chunks: int = 0  # of prompts that did not reach the prompt's end: chunked prefill at work
    aborted: int = 0
    images: int = 0  # of sequences, each counted once its features are there ...
    image_hits: int = 0  # ... and of these such whose features, or the prefix that they are in, were there before
    tower_seconds: float = 0.0  # that the tower has worked on rank 0, whose pipeline stage may have none
    # Counts by source: how often a sequence had drafts, how many drafts, and how many were accepted of each position.
    speculation: dict[str, list[int]] = {}
    speculation_seconds: float = 0.0  # of steps that verified drafts ...
    plain_seconds: float = 0.0  # ... and what as many tokens take without


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The weights are loaded and requests are served from now on."""

    max_model_len: int  # prompt + output of one sequence, in tokens
    vocab_size: int
    kv_tokens: int  # tokens that fit in the KV cache
    block_size: int
    max_num_seqs: int
    ranks: int
    pids: list[int] = []  # of each rank, in rank order
    hosts: list[str] = []
    model: int = 0  # the number that Switch had; 0: the one that the job began with
    images: bool = False  # the model takes images ...
    image_pixels: int = 0  # ... which are scaled down to so many pixels; 0: as many as the model takes


class Unloaded(msgspec.Struct, frozen=True, tag="unloaded"):
    """The ranks have given the model's memory back, or brought back its weights only, and wait for a Switch."""


class SwitchFailed(msgspec.Struct, frozen=True, tag="switch_failed"):
    """Says that a model cannot be loaded. Ready of the model from before follows, or Unloaded where there was none."""

    model: int
    message: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far loading is. `total` 0: unknown."""

    phase: str
    done: int
    total: int


class Draining(msgspec.Struct, frozen=True, tag="draining"):
    """The ranks were asked to drain (SIGUSR1). The server answers with `Drain` once its last request is here."""


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    deltas: list[Delta]
    stats: Stats | None = None  # at most a few times a second, and whenever the engine falls idle


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The job is about to end; every open request fails with this message."""

    message: str
    code: int


ToServer = Ready | Progress | Draining | Deltas | Fatal | Unloaded | SwitchFailed | Heartbeat


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that enters a row, at admission or after a preemption, with all that the ranks must know of it."""

    row: int
    tokens: bytes  # u32: the prompt and, after a preemption, what was generated since
    prompt_len: int  # tokens[prompt_len:] is output
    num_computed: int  # leading tokens whose keys and values are in the cache already
    blocks: bytes  # u32: of the first cache group (cache_groups.py); any that are behind the group's window
    sampling: SamplingParams
    constrained: bool = False  # steps that sample it get `Masks`
    further_blocks: list[bytes] = []  # u32: of each further cache group
    pictures: list[Picture] = []  # images in the prompt


class Plan(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The work of every rank in one step. Deltas only: the ranks keep each row's tokens, blocks and parameters.

    Applied in this order: rejected, freed, new, (block_rows, block_ids), then the step itself over `rows`. A row whose
    count is not in `counts` computes one token. A row samples when its last known token is computed.

    With `drafts` the first rows compute their newest token and query_len - 1 drafts behind it, and sample at each. The
    drafts stand up to the first that differs from what was sampled before it; `counts` has all other rows.
    """

    step: int
    rows: bytes = b""  # u16: the rows of this step, one-token rows first; behind those with drafts ones of query_len
    counts: bytes = b""  # u32: tokens to compute for the last len(counts) rows
    new: list[NewSequence] = []
    freed: bytes = b""  # u16
    block_rows: bytes = b""  # u16: block tables that get one more block: a cache group's number * rows + row ...
    block_ids: bytes = b""  # u32: ... and which
    stop: int = -1  # >= 0: end the program with this exit code ...
    switch: bytes = b""  # ... or go on with another model: a Switch
    swap_out: bytes = b""  # u32: a block and the host block that it is copied to, in turn, before all else
    swap_in: bytes = b""  # u32: a host block and the block that it is copied to, in turn, after that
    state_loads: bytes = b""  # u32: a state snapshot and the row that it is copied to, in turn, before the step
    state_saves: bytes = b""  # u32: a row and the snapshot that its states are copied to, in turn, after the step
    query_len: int = 1  # tokens of a row with drafts
    drafts: bytes = b""  # i32: query_len - 1 of each of the first rows, filled up with NO_DRAFT; or MADE
    rejected: bytes = b""  # u16: a row, and how many of the newest tokens that ranks count it has not, in turn
    wanted: int = 0  # drafts that the ranks' model makes of each row that samples
    keeps: bool = False  # the ranks keep these: the output has none and does not wait for them
    follows: bool = False  # that model reads the step's tokens though none are wanted; else it never sees them
    # Parts of the work on images that each rank of the first stage does before the step; empty: none does any.
    tower: list[int] = []


class Masks(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The tokens that a step's constrained rows may sample.

    They follow the plan as soon as the tokens before are known, in the order of the steps.
    """

    step: int
    bits: bytes  # of each constrained row that samples, in the plan's order: a bit for each token, in u32 words


ToRanks = Plan | Masks | Pixels


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a step has sampled: a list for each row that samples, in the plan's order. Of a row with drafts
    these are the tokens up to the first that was drafted otherwise.

    The step has computed keys and values of all of a row's tokens but the last.
    """

    ids: bytes  # u32: one row's tokens behind the other's
    logprobs: dict[int, TokenLogprob] = {}  # by index into ids, of those that want them
    embeddings: dict[int, bytes] = {}  # f32, by index among the rows that sample
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}  # by the same index, of prompts that the step has completed
    counts: bytes = b""  # u8: tokens of each row, at least one; empty: one each
    failed: list[int] = []  # rows, by their index among those that sample, for which memory ran out; ignore their ids
    drafts: bytes = b""  # u32: as many as the plan wants of each row that samples, unless the ranks keep them

    def tokens(self) -> list[list[int]]:
        """The tokens of each row that samples."""
        ids = unpack_u32(self.ids).tolist()
        if not self.counts:
            return [[token] for token in ids]
        ends = itertools.accumulate(self.counts)
        return [ids[end - count : end] for end, count in zip(ends, self.counts, strict=True)]


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(ToRanks)
_step_output_decoder = msgspec.msgpack.Decoder(StepOutput)


def encode_plan(plan: ToRanks) -> bytes:
    """A plan, the masks of one, or an image."""
    return _encoder.encode(plan)


def decode_plan(data) -> ToRanks:
    return _plan_decoder.decode(data)


def encode_switch(switch: Switch) -> bytes:
    return _encoder.encode(switch)


def decode_switch(data: bytes) -> Switch:
    return msgspec.msgpack.decode(data, type=Switch)


def encode_step_output(output: StepOutput) -> bytes:
    return _encoder.encode(output)


def decode_step_output(data) -> StepOutput:
    return _step_output_decoder.decode(data)


class Frames:
    """Splits a byte stream into frames.

    Raises ValueError on what is no message, or longer than MAX_FRAME: the peer does not speak this protocol.
    """

    def __init__(self, message_type, reject: Callable[[Any, msgspec.ValidationError], None] | None = None):
        """reject: called with a message whose fields have wrong types, instead of raising; it may raise."""
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._reject = reject
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """Whether a message has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list:
        """Add received bytes; return the messages that are complete now."""
        self._buffer += data
        messages = []
        offset = 0
        while len(self._buffer) - offset >= FRAME.size:
            (length,) = FRAME.unpack_from(self._buffer, offset)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes, at most {MAX_FRAME} are allowed")
            end = offset + FRAME.size + length
            if end > len(self._buffer):
                break
            try:
                messages.append(self._decoder.decode(memoryview(self._buffer)[offset + FRAME.size : end]))
            except msgspec.ValidationError as error:
                if self._reject is None:
                    raise
                self._reject(msgspec.msgpack.decode(self._buffer[offset + FRAME.size : end]), error)
            offset = end
        if offset:
            del self._buffer[:offset]
        return messages


def frame(message) -> bytearray:
    """One message as a frame."""
    made = bytearray(FRAME.size)
    _encoder.encode_into(message, made, FRAME.size)  # not joined afterwards: images are megabytes
    FRAME.pack_into(made, 0, len(made) - FRAME.size)
    return made
