"""Ranks as threads that serve random requests, with drafts and without: tokens must be the same."""

import functools
import json
import random
from collections import Counter
from typing import NamedTuple

import msgspec
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.broadcast import ThreadPlanBroadcast
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.rank import protocol
from phalanx.rank.options import Options
from phalanx.rank.scheduler.blocks import Blocks
from phalanx.rank.scheduler.grammar import Grammars
from phalanx.rank.scheduler.host_tier import HostTier
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.scheduler.scheduler import Scheduler
from phalanx.rank.scheduler.snapshots import Snapshots
from phalanx.rank.scheduler.speculation import Speculation
from phalanx.rank.server.text.load import Text
from phalanx.rank.worker.engine import Engine, RankContext
from phalanx.rank.worker.executor import LocalExecutor, follow
from phalanx.rank.worker.swap import CopyCost

from .scheduler.schemas import random_schema
from .scheduler.uniform import compile_all

VOCAB, MAX_LEN = 512, 160
KINDS = "right", "wrong", "random", "last wrong", "mixed"


class Told(NamedTuple):
    """How it went."""

    verified: Counter  # steps of sequences with drafts of each kind
    constrained: int  # of these, of sequences with a grammar
    preemptions: int
    plain_steps: int
    steps: int


class Drafts:
    """Speculation that takes drafts from what requests are known to get, and spoils them. q is drawn for each step."""

    model_drafts, model_follows, reads_prompts = 0, False, False

    def __init__(self, wanted, seed, query_lens):
        """wanted: request id -> its tokens."""
        self.wanted, self.draw, self.query_lens = wanted, random.Random(seed), query_lens
        self.lookahead = seed % 3
        self.counts = Counter()
        self.constrained = 0

    def verified(self, sequence, drafted, accepted):
        assert 0 <= accepted <= drafted

    def made(self, sequence, drafts):
        """A draft model's: the step verifies others."""

    def preempted(self, sequence):
        pass

    def ended(self, sequence):
        pass

    def took(self, *_):
        pass

    def stats(self):
        return {}

    def choose(self, sequences):
        query_len = self.draw.choice(self.query_lens)
        found = {}
        for one in sequences if query_len > 1 else ():
            if one.grammar is not None and not (one.grammar.ready and one.grammar.worker.prompt):
                continue
            if drafts := self._drafts(one, query_len - 1):
                found[one.id] = drafts
                self.counts[self._kind(one)] += 1
                self.constrained += one.grammar is not None
        return query_len, found

    def _kind(self, sequence):
        return KINDS[int(sequence.id) % len(KINDS)]

    def _drafts(self, sequence, count):
        done, kind = len(sequence.tokens) - sequence.prompt_len, self._kind(sequence)
        drafts = list(self.wanted.get(sequence.id, ())[done : done + count])
        drafts = drafts[: self.draw.randint(0, count)] if self.draw.random() < 0.2 else drafts
        for i, token in enumerate(drafts):
            if kind == "wrong" or (kind == "last wrong" and i == len(drafts) - 1):
                drafts[i] = (token + 1) % VOCAB
            elif kind == "random" or (kind == "mixed" and self.draw.random() < 0.3):
                drafts[i] = self.draw.randrange(VOCAB)
        return drafts


class Hasty(Speculation):
    """Speculation that takes steps with drafts for as fast as others."""

    def took(self, sequences, query_len, tokens, seconds):
        super().took(sequences, query_len, tokens, 1.0)


class Server:
    """Rank 0's scheduler and ranks, stepped by hand as the loop does."""

    def __init__(self, limits, executor, stages, speculation=None):
        pool = Blocks(
            limits.blocks, limits.block_size, limits.prefix_cache, HostTier(*limits.host_blocks),
            Snapshots(limits.snapshots), limits.groups,
        )  # fmt: skip
        most = limits.max_num_seqs, limits.token_budget, limits.max_model_len, stages
        self.scheduler = Scheduler(pool, *most, speculation)
        self.replica = Replica(self.scheduler, executor)
        self.results = {}  # by request id: tokens, log-probabilities, why it ended
        self.steps = 0

    def turn(self):
        if not self.replica.plan() and self.replica.busy:
            self.steps += 1
            self.take(self.replica.finish())
            self.scheduler.check([planned for planned, _ in self.replica._in_flight])

    def take(self, deltas):
        for delta in deltas:
            one = self.results.setdefault(delta.id, {"tokens": [], "logprobs": [], "finish": "", "embedding": b""})
            assert not one["finish"]
            one["tokens"] += delta.tokens
            one["logprobs"] += delta.logprobs
            one["finish"] = delta.finish and (delta.finish, delta.stop_token)
            one["embedding"] += delta.embedding


def random_request(draw, number):
    """A request and its grammar's text; all fields are drawn."""
    beginning = [draw.randrange(3, VOCAB) for _ in range(draw.choice([0, 0, 20]))]
    prompt = [*random.Random(draw.randrange(4)).choices(range(3, VOCAB), k=draw.choice([1, 5, 18, 40])), *beginning]
    some = functools.partial(draw.choices, range(VOCAB))
    grammar, fields = "", {}
    if draw.random() < 0.06:
        fields = dict(max_tokens=1, pooling=draw.choice(["mean", "last", "cls"]))
        return protocol.Request(str(number), protocol.pack_u32(prompt), protocol.SamplingParams(**fields)), ""
    fields["max_tokens"] = draw.choice([1, 2, 5, 12, 30, MAX_LEN - len(prompt)])
    fields["temperature"] = draw.choice([0.0, 0.0, 0.6, 1.0, 1.3])
    fields["seed"] = draw.randrange(1 << 31)

    def sometimes(name, make, chance=0.25):
        if draw.random() < chance:
            fields[name] = make()

    sometimes("top_k", lambda: draw.randint(1, 60))
    sometimes("top_p", lambda: draw.uniform(0.2, 1.0))
    sometimes("min_p", lambda: draw.uniform(0.0, 0.2))
    sometimes("repetition_penalty", lambda: draw.uniform(0.8, 1.5))
    if draw.random() < 0.3 and "repetition_penalty" in fields:
        fields["repeat_last_n"] = draw.randint(1, 20)
    sometimes("presence_penalty", lambda: draw.uniform(-1, 1))
    sometimes("frequency_penalty", lambda: draw.uniform(-1, 1))
    sometimes("logit_bias", lambda: {token: draw.uniform(-5, 5) for token in some(k=8)})
    sometimes("logprobs", lambda: draw.randint(0, 5), 0.4)
    if draw.random() < 0.1:
        fields |= dict(logprobs=3, logprob_token_ids=(7, 8, 9))
    sometimes("prompt_logprobs", lambda: 2, 0.05)
    sometimes("bad_words", lambda: tuple(tuple(some(k=draw.randint(1, 3))) for _ in range(30)))
    sometimes("allowed_token_ids", lambda: tuple(sorted(set(some(k=20)))), 0.1)
    sometimes("stop_token_ids", lambda: tuple(some(k=draw.choice([1, 30]))), 0.5)
    sometimes("min_tokens", lambda: draw.randint(0, fields["max_tokens"]))
    if draw.random() < 0.2:
        fields |= dict(thinking_budget=draw.randint(0, 6), thinking_tokens=(5, 6), thinking=draw.random() < 0.7)
    if draw.random() < 0.25 and "allowed_token_ids" not in fields:
        grammar = json.dumps({"grammars": [draw.choice([_schema, _regex, _choice])(draw)]})
        fields["stop_token_ids"] = (2,)
        fields.pop("bad_words", None), fields.pop("thinking_budget", None)
    sampling = protocol.SamplingParams(**fields)
    salt, priority = draw.choice(["", "", "a"]), draw.choice([0, 0, 0, 1])
    of = str(number), protocol.pack_u32(prompt), sampling, priority
    return protocol.Request(*of, cache_salt=salt, grammar=grammar), grammar


def predicted(request, wanted, draw):
    """The request, now and then with a prediction: its answer, of which some tokens are others."""
    if draw.random() < 0.5 or request.sampling.pooling:
        return request
    answer = [draw.randrange(VOCAB) if draw.random() < 0.1 else token for token in wanted.get(request.id, ())]
    return msgspec.structs.replace(request, prediction=protocol.pack_u32(answer))


def _schema(draw):
    return {"json_schema": {**random_schema(draw, 2), "x-guidance": {"lenient": True}}}


def _regex(draw):
    return {"lark_grammar": f"start: /{draw.choice(['[a-c]{3,9}', '(yes|no|perhaps)', '[0-9]+[.][0-9]{2}'])}/"}


def _choice(draw):
    return {"lark_grammar": 'start: "the function is called get_weather" | "nothing of the kind"'}


def serve(server, requests, grammars, seed):
    """Serve all requests, with some turns between arrivals; some are aborted. The aborted ones' ids."""
    draw, aborted = random.Random(seed), set()
    for request, grammar in requests:
        made = compile_all(grammars, [request])[request.id] if grammar else None
        if isinstance(made, str):  # no text fits the schema
            server.results[request.id] = {"finish": made}
            continue
        server.scheduler.add(request, grammar=made)
        for _ in range(draw.randrange(9)):
            server.turn()
        if draw.random() < 0.05:
            aborted.add(name := str(draw.randrange(int(request.id) + 1)))
            server.scheduler.abort([name])
    for _ in range(100_000):
        if server.replica.idle:
            break
        server.turn()
        for one in grammars.take()[1]:
            server.take(server.scheduler.end(one))
    assert server.replica.idle
    server.scheduler.check_empty()
    return aborted


def compare(plain, other, aborted, requests):
    for request, _ in requests:
        name = request.id
        one, two = plain.results.get(name), other.results.get(name)
        if name in aborted:
            if one and two and "tokens" in one:
                length = min(len(one["tokens"]), len(two["tokens"]))
                assert one["tokens"][:length] == two["tokens"][:length], (name, request.sampling)
            continue
        about = name, request.sampling, protocol.unpack_u32(request.tokens).tolist(), request.grammar, one, two
        assert one.keys() == two.keys() and one["finish"] == two["finish"], about
        if "tokens" not in one:
            continue
        assert one["tokens"] == two["tokens"], about
        assert [x.token for x in one["logprobs"]] == [x.token for x in two["logprobs"]], about
        for x, y in zip(one["logprobs"], two["logprobs"], strict=True):
            assert abs(x.logprob - y.logprob) < 1e-4 and len(x.top) == len(y.top), about
            for (_, p), (_, q) in zip(x.top, y.top, strict=True):
                assert abs(p - q) < 1e-4, about
        given = [torch.frombuffer(bytearray(r["embedding"] or b"\0" * 4), dtype=torch.float32) for r in (one, two)]
        assert torch.allclose(*given, atol=1e-4), about


def check(
    path, *, tp=1, pp=1, replays=True, requests=60, seed=0, host=0, mem=1, sequences=6, budget=64, blocks=0, real=False,
    speculate="ngram", draft_model="", draft_tensor_parallel_size=0, texts=None, vocab=VOCAB,
    device="cpu",
):  # fmt: skip
    """Random requests get what they get without drafts. blocks: of the pool, if not all that fit. real: drafts are what
    sequences repeat, as users' are, of themselves and of earlier answers to the same requests, what clients predict,
    and what a model drafts that the ranks have. texts: requests instead of random ones, with their grammars."""
    torch.set_num_threads(1)
    draw, drawn = random.Random(seed), not texts
    texts = texts or [random_request(draw, i) for i in range(requests)]
    grammars = Grammars()
    grammars.know(Text(str(path)).vocabulary(vocab))
    found = []

    def rank(world):
        torch.set_grad_enabled(False)
        place = RankContext(
            world, ["here"] * world.size, mesh.build(world, tp, pp), torch.device(device), LocalWatchdog(world.rank)
        )
        options = Options(
            model=str(path), dtype="f32", max_num_seqs=sequences, max_model_len=MAX_LEN, mem=mem,
            max_num_batched_tokens=budget, kvcache_mem_cpu=host, block_size=4, speculate=speculate, device=device,
            draft_model=draft_model, draft_tensor_parallel_size=draft_tensor_parallel_size,
        )  # fmt: skip
        engine = Engine(options, place)
        limits = engine.load()
        limits = limits._replace(blocks=blocks or limits.blocks)
        control = ThreadPlanBroadcast(world)
        if not replays:
            engine.runner._graphs = None
        if world.rank:
            follow(engine.runner, control, None)
        else:
            executor = LocalExecutor(control, engine.runner)
            plain = Server(limits, executor, pp)
            aborted = serve(plain, texts, grammars, seed)
            wanted, again = {name: one.get("tokens", []) for name, one in plain.results.items()}, texts
            drafts = Drafts(wanted, seed, limits.query_lens)
            if real:
                drafts = Hasty(limits.query_lens, 64, limits.draft_model)
                for request, _ in texts[:: 1 + drawn]:
                    drafts._answers.add(request.cache_salt, wanted.get(request.id, []))
                if drawn:
                    again = [(predicted(request, wanted, draw), grammar) for request, grammar in texts]
            other = Server(limits, executor, pp, drafts)
            aborted |= serve(other, again, grammars, seed + 1)
            executor.start(protocol.Plan(step=-1, stop=0))
            counters = other.scheduler.counters
            of = drafts.counts, getattr(drafts, "constrained", 0)
            if real:
                of = Counter({source: sum(counts.accepted) for source, counts in drafts.counts.items()}), 0
            found.append(Told(*of, counters.preemptions, plain.steps, other.steps))
            compare(plain, other, aborted, texts)
        engine.unload()

    before = CopyCost.least_blocks
    try:
        if host:
            CopyCost.least_blocks = lambda self, compute: 1
        threads.run(rank, tp * pp)
    finally:
        CopyCost.least_blocks = before
        grammars.close()
    return found[0]
