"""Speculation: which tokens sequences will probably have next, and how many of these a step verifies.

Drafts come from what a sequence repeats (ngram.py), from the client's prediction, from a model that the ranks run, or
from a grammar that leaves no choice.
How many a step verifies is what gives the most tokens a second: by how often drafts of the sequence were right, and by
how long steps of so many sequences and tokens took, at the start and since. Whether a repetition goes on is seen
without verifying it, as the tokens come anyway: so text that matches nothing costs the looking alone, and that grows
rare. A model that drafts rests where it does not pay, and what has not paid is tried again after ever longer pauses.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Any

from ..protocol import MADE, MAX_DRAFTS
from .grammar import Grammar
from .ngram import Answers, Ngrams
from .sequence import Sequence

DECAY = 0.9  # of what was seen, at each further observation
PRIOR = 2.0  # observations that what other sequences had counts for
RUNS = 5, 9, 17  # equal tokens so far, by which drafts are told apart: longer repetitions go on more often
FIRST_RATES = (0.2, 0.5, 0.7, 0.9)  # of each, until something was seen
MODEL_RATES = (0.7,) * MAX_DRAFTS  # the same of a model's drafts, by position: where those before were right
GRAMMAR = "grammar"  # the source of drafts that a grammar forces ...
FORCED_RATE = 0.9  # ... and how often they are right at first: the same text may be other tokens
TIMES = 15  # durations that are kept, of which the median counts
FEW = 3  # of them, without drafts, that a number of sequences needs to be compared
HOPED = 1.02  # times the duration without drafts that a step takes as long as it was neither tried nor measured
GAIN = 1.15  # that drafts must promise, as times and chances are estimates
TRY_AGAIN = 32  # steps that were too slow with drafts before it is tried again: the first time, then twice as many ...
MAX_PAUSE = 1 << 14  # ... up to so many
MAX_REST = 32  # tokens between two looks at what a sequence repeats
CLEAR = 0.5  # chance of a first draft for which a sequence is looked at again at once
PAUSE = 64  # steps without a model's drafts once these do not pay: the first time, then twice as many
PATIENCE = 8  # steps without use for its drafts, before a model rests: some may have been wrong by chance
AHEAD = 512  # steps before it drafts again, in which a model reads prompts: most answers are no longer
CATCH_UP = 8  # steps that a model reads before it drafts, where it has missed as many or more


class Rates:
    """How often drafts are right, by class: positions, or lengths of runs. Older observations count less."""

    def __init__(self, prior: list[float] | Rates):
        self._prior = prior
        count: int = len(prior) if isinstance(prior, list) else prior.count
        self.count: int = count
        self._right, self._seen = [0.0] * count, [0.0] * count

    def add(self, kind: int, right: bool) -> None:
        self._right[kind] = self._right[kind] * DECAY + right
        self._seen[kind] = self._seen[kind] * DECAY + 1
        if isinstance(self._prior, Rates):
            self._prior.add(kind, right)

    def __getitem__(self, kind: int) -> float:
        return (self._right[kind] + PRIOR * self._prior[kind]) / (self._seen[kind] + PRIOR)


def kind_of_run(length: int) -> int:
    """The class of a draft behind so many equal tokens."""
    return sum(length >= border for border in RUNS)


class StepTimes:
    """How long steps take, by sequences and tokens of each. Medians of the newest ones; and as long as there are none,
    what the ranks have measured at the start."""

    def __init__(self, measured: Iterable[tuple[int, int, float]] = ()) -> None:
        """measured: sequences, tokens of each, and seconds of such a step; sequences ascend."""
        self._measured: dict[int, list[tuple[int, float]]] = {}  # by tokens of each
        for sequences, query_len, seconds in measured:
            self._measured.setdefault(query_len, []).append((sequences, seconds))
        self._doubted: set[tuple[int, int]] = set()  # measured ones that were to be tried again
        self._seconds: dict[tuple[int, int], deque[float]] = {}
        self._median: dict[tuple[int, int], float] = {}
        self._passed: dict[tuple[int, int], int] = {}
        self._patience: dict[tuple[int, int], int] = {}

    def add(self, sequences: int, query_len: int, seconds: float) -> None:
        key = _bucket(sequences), query_len
        kept = self._seconds.setdefault(key, deque(maxlen=TIMES))
        kept.append(seconds)
        if len(kept) >= FEW or query_len > 1:  # one try may cost much
            self._median[key] = median(kept)

    def __getitem__(self, key: tuple[int, int]) -> float:
        """Seconds of a step of so many sequences, and so many tokens of each; 0: nothing is known of such sequences.
        Further tokens add what they added at the start. What was neither tried nor measured is hoped to be fast, as far
        as fewer tokens were."""
        sequences, query_len = key
        number = _bucket(sequences)
        found = self._median.get((number, query_len))
        if found is not None:
            return found
        plain = self._median.get((number, 1), 0.0) or self._at_start(sequences, 1)
        if query_len == 1:
            return plain
        if plain and self._was_measured(sequences, query_len):
            return plain + max(0.0, self._at_start(sequences, query_len) - self._at_start(sequences, 1))
        fewer = next((n for n in range(query_len - 1, 1, -1) if (number, n) in self._median), 1)
        if not plain or fewer == 1:
            return HOPED * plain
        slower = max(0.0, self._median[number, fewer] - plain) / (fewer - 1)
        return plain + slower * (fewer - 1 + (query_len - fewer) / 2)

    def tried(self, sequences: int, query_len: int) -> bool:
        return (_bucket(sequences), query_len) in self._median or self._was_measured(sequences, query_len)

    def _was_measured(self, sequences: int, query_len: int) -> bool:
        if (_bucket(sequences), query_len) in self._doubted:
            return False
        return bool(self._at_start(sequences, query_len) and self._at_start(sequences, 1))

    def _at_start(self, sequences: int, query_len: int) -> float:
        """Seconds as measured at the start, between two numbers of sequences in proportion; 0: unknown."""
        before = 0, 0.0
        for size, seconds in self._measured.get(query_len, ()):
            if size >= sequences:
                share = (sequences - before[0]) / (size - before[0])
                return before[1] + share * (seconds - before[1])
            before = size, seconds
        return 0.0

    def passed_over(self, sequences: int, query_len: int) -> None:
        """Count that a number of tokens is not used, as it is too slow. Ever more rarely that is forgotten."""
        key = _bucket(sequences), query_len
        self._passed[key] = passed = self._passed.get(key, 0) + 1
        patience = self._patience.get(key, TRY_AGAIN)
        if passed >= patience:
            self._passed[key], self._patience[key] = 0, min(2 * patience, MAX_PAUSE)
            self._doubted.add(key)
            self._seconds.pop(key, None)
            self._median.pop(key, None)


def _bucket(sequences: int) -> int:
    """Numbers up to 8 as they are, larger ones rounded down to one of four steps of each doubling."""
    if sequences <= 8:
        return sequences
    step = 1 << (sequences.bit_length() - 3)
    return sequences // step * step


class Counts:
    """Counts of one source of drafts, for /metrics."""

    def __init__(self) -> None:
        self.drafts = 0  # times that a sequence had some
        self.tokens = 0
        self.accepted: list[int] = []  # by position

    def add(self, drafted: int, accepted: int) -> None:
        self.drafts += 1
        self.tokens += drafted
        self.accepted += [0] * (accepted - len(self.accepted))
        for i in range(accepted):
            self.accepted[i] += 1

    def listed(self) -> list[int]:
        return [self.drafts, self.tokens, *self.accepted]


class Drafter:
    """A sequence's drafts and how often they were right."""

    def __init__(self, ngrams: Ngrams, rates: Rates, model_rates: Rates):
        """rates: of what ngrams find; model_rates: of what the ranks' model drafts."""
        self.ngrams = ngrams
        self.rates, self.model_rates = rates, model_rates
        self.forced: list[int] = []  # tokens that its grammar forces next ...
        self.forced_rate = Rates([FORCED_RATE])  # ... and how often these were right
        self.made: list[int] = []  # that model's newest drafts ...
        self.made_behind = 0  # ... behind so many tokens of the sequence
        self.count = 0  # tokens of the sequence when it was looked at last
        self.source = ""  # of the drafts that a step verifies now
        self.rest = self.look_at = 0  # tokens until the next look, and tokens of the sequence when it is due

    def follow(self, count: int) -> None:
        """Take tokens into account that have come since, up to so many."""
        self.count = count
        for length, went_on in self.ngrams.follow():
            self.rates.add(kind_of_run(length), went_on)

    def chances(self, count: int, ahead: int) -> list[float]:
        """For each of the next drafts the chance that it and all before it are right. They follow `ahead` tokens that
        are not known yet."""
        run, total = self.ngrams.run, ahead + count
        found = itertools.accumulate((self.rates[kind_of_run(run + i)] for i in range(total)), operator.mul)
        return list(found)[ahead:]

    def forced_chances(self, count: int) -> list[float]:
        """`chances` of tokens that its grammar forces."""
        return [self.forced_rate[0] ** (i + 1) for i in range(min(count, len(self.forced)))]

    def looked(self, promising: bool) -> None:
        """Set when to look next: at once where drafts promise much, else ever later."""
        self.rest = 0 if promising else min(max(1, 2 * self.rest), MAX_REST)
        self.look_at = self.count + self.rest

    def model_chances(self, count: int) -> list[float]:
        """`chances` of the model's drafts."""
        return list(itertools.accumulate((self.model_rates[i] for i in range(count)), operator.mul))


class Speculation:
    """One replica's."""

    def __init__(
        self, query_lens: Iterable[int], most_tokens: int, model: str = "",
        measured: Iterable[tuple[int, int, float]] = (),
    ):  # fmt: skip
        """query_lens: tokens of a sequence that a step may have, ascending from 1. most_tokens: of a step that has
        drafts. model: the kind of the model that drafts on the ranks; empty: there is none. measured: as StepTimes has
        it."""
        self._query_lens = list(query_lens)[1:]
        self._most_tokens = most_tokens
        self._model = model
        # Drafts that the ranks' model makes of each sequence after the step for which `choose` was asked; 0: it rests.
        self.model_drafts = self._query_lens[-1] - 1 if model else 0
        self.model_follows = False  # whether it reads that step's tokens, where it makes none
        self._behind = 0  # steps that it has missed, up to CATCH_UP: it reads as many before it drafts
        self._steps = self._looked = 0  # steps that decode, and the sequences of the last one that looked
        self._look_at = 0  # the step at which one of these is to be looked at
        self._resumes = 0  # the step at which the model's last pause ends
        self._pause, self._unpaid = PAUSE, 0
        # Tokens behind a step's last one for which a sequence has blocks: of models that draft.
        self.lookahead = self._query_lens[-1] - 1 if model else 0
        self._rates, self._model_rates = Rates(list(FIRST_RATES)), Rates(list(MODEL_RATES))
        self._answers = Answers()
        self._times = StepTimes(measured)
        self._drafters: dict[str, Drafter] = {}
        self.counts: dict[str, Counts] = {}  # by source
        self.seconds = self.plain_seconds = 0.0  # of steps with drafts; and of as many tokens without them

    # -- planning

    @property
    def reads_prompts(self) -> bool:
        """Whether the model reads the next step's prompts, although it may rest: it drafts badly behind those that it
        has not seen. Reading takes as long as one or two of the target's layers."""
        return bool(self._model) and self._resumes - self._steps <= AHEAD

    def choose(self, sequences: list[Sequence]) -> tuple[int, dict[str, list[int]]]:
        """Tokens that a step computes of each of these sequences, which decode, and drafts by their ids."""
        if not sequences:  # prompts alone: what their ends want is what was wanted last
            return 1, {}
        self._steps += 1
        self.model_drafts, self.model_follows = 0, False
        chosen = self._choose(sequences)
        if not self.model_drafts and not self.model_follows:
            self._behind = min(self._behind + 1, CATCH_UP)
        return chosen

    def _choose(self, sequences: list[Sequence]) -> tuple[int, dict[str, list[int]]]:
        count = len(sequences)
        model = self._model if self._steps >= self._resumes else ""
        waits = not model and self._steps < self._look_at and count == self._looked
        possible = self._possible(count) if not waits else []
        if model and not any(one.grammar is None or one.grammar.planned_ahead for one in sequences):
            model = ""  # no sequence may have drafts
        if model and possible and self._behind:
            self._behind, self.model_follows, model = self._behind - 1, True, ""
        if not possible:
            return 1, {}
        chances: dict[str, tuple[Drafter, list[float]]] = {}
        constrained: dict[str, Grammar] = {}  # sequences whose next mask is there
        due = MAX_REST
        for one in sequences:
            grammar = one.grammar
            drafter = self._drafters.get(one.id) or self._new(one)
            known = len(one.tokens)
            if known < drafter.look_at and not model and grammar is None:
                due = min(due, drafter.look_at - known)
                continue
            if drafter.count != known:
                drafter.follow(known)
            if grammar is not None:
                due = 1
                if not grammar.planned_ahead:
                    continue
                if not one.in_flight:
                    constrained[one.id] = grammar
                drafter.forced = grammar.forced[one.in_flight :] if grammar.ready and not grammar.over else []
            found = self._chances(drafter, possible[-1] - 1, one.in_flight, model)
            drafter.looked(bool(found) and found[0] >= CLEAR)
            due = min(due, max(1, drafter.rest))
            if found:
                chances[one.id] = drafter, found
        self._look_at, self._looked = self._steps + due, count
        if not chances:
            return 1, {}
        query_len = self._best(count, [found for _, found in chances.values()], possible)
        if model:
            self._rest_or_go_on(query_len > 1)
        if query_len == 1:
            return 1, {}
        if model:
            self.model_drafts = query_len - 1
        drafts = {}
        for name, (drafter, _) in chances.items():
            if drafter.source == GRAMMAR:
                guessed = drafter.forced[: query_len - 1]
            elif drafter.source:
                guessed = drafter.made[: query_len - 1] if drafter.made_behind == drafter.count else []
            else:
                guessed, drafter.source = drafter.ngrams.draft(query_len - 1), drafter.ngrams.source
            if guessed and (name not in constrained or constrained[name].allows(guessed[0])):
                drafts[name] = guessed
        return (query_len, drafts) if drafts else (1, {})

    def _rest_or_go_on(self, pays: bool) -> None:
        """Have the model rest where drafts do not pay for some steps, ever longer. Then it counts as often right as at
        first. Meanwhile it drafts a token, which is compared with what comes and not verified."""
        self._unpaid = 0 if pays else self._unpaid + 1
        if pays:
            if self._steps >= self._resumes + self._pause:
                self._pause = PAUSE
            return
        if self._unpaid < PATIENCE:
            self.model_drafts = 1
            return
        self._unpaid = 0
        self._resumes = self._steps + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)
        self._model_rates = Rates(list(MODEL_RATES))
        for drafter in self._drafters.values():
            drafter.model_rates = Rates(self._model_rates)

    def _chances(self, drafter: Drafter, count: int, ahead: int, model: str) -> list[float]:
        """The chances of a sequence's drafts, by the source that promises most; the model's also where it has yet to
        make them."""
        repeated = drafter.chances(count, ahead) if drafter.ngrams.run else []
        sources = {GRAMMAR: drafter.forced_chances(count)}
        if model:
            sources[model] = drafter.model_chances(count)
        sources[""] = repeated
        drafter.source = max(sources, key=lambda source: sum(sources[source]))
        return sources[drafter.source]

    def _possible(self, count: int) -> list[int]:
        """Tokens of each of so many sequences that may pay: those tried, and of the others the fewest."""
        found = []
        for query_len in self._query_lens:
            if query_len * count > self._most_tokens:
                break
            if self._may_pay(count, query_len):
                found.append(query_len)
            if not self._times.tried(count, query_len):
                break
        return found

    def _may_pay(self, count: int, query_len: int) -> bool:
        """Whether such a step would pay if all drafts were right."""
        plain, seconds = self._times[count, 1], self._times[count, query_len]
        pays = query_len * plain > GAIN * seconds
        if plain and not pays:
            self._times.passed_over(count, query_len)
        return pays

    def _best(self, count: int, chances: list[list[float]], possible: list[int]) -> int:
        """The tokens of each sequence that give most tokens a second, where sequences are not slower on the whole, by
        the geometric mean: those without drafts wait for the others'. chances: of the drafts of those that have any."""
        plain = self._times[count, 1]
        best, most = 1, GAIN * count / plain
        for query_len in possible:
            each, seconds = [1 + sum(found[: query_len - 1]) for found in chances], self._times[count, query_len]
            tokens = count + sum(each) - len(each)
            if tokens / seconds > most and sum(map(math.log, each)) >= count * math.log(seconds / plain):
                best, most = query_len, tokens / seconds
            elif tokens > GAIN * HOPED * count:
                self._times.passed_over(count, query_len)
        return best

    def _new(self, sequence: Sequence) -> Drafter:
        ngrams = Ngrams(sequence, self._answers, sequence.prediction)
        made = Drafter(ngrams, Rates(self._rates), Rates(self._model_rates))
        self._drafters[sequence.id] = made
        return made

    # -- results

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A step has verified so many drafts of a sequence."""
        drafter = self._drafters.get(sequence.id)
        if drafter is not None and self._model and drafter.source == self._model:
            for i in range(min(accepted + 1, drafted)):
                drafter.model_rates.add(i, i < accepted)
            drafter.made = []
        elif drafter is not None and drafter.source == GRAMMAR:
            for i in range(min(accepted + 1, drafted)):
                drafter.forced_rate.add(0, i < accepted)
        if drafter is not None and drafted:
            self.counts.setdefault(drafter.source, Counts()).add(drafted, accepted)

    def made(self, sequence: Sequence, drafts: list[int]) -> None:
        """The ranks have drafted what follows a sequence's tokens. MADE stands for drafts that they keep."""
        drafter = self._drafters.get(sequence.id) or self._new(sequence)
        for i, (drafted, token) in enumerate(zip(drafter.made, sequence.tokens[drafter.made_behind :], strict=False)):
            if drafted != MADE:
                drafter.model_rates.add(i, drafted == token)  # of no use, but seen
            if drafted != token:
                break
        drafter.made, drafter.made_behind = drafts, len(sequence.tokens)

    def preempted(self, sequence: Sequence) -> None:
        """Forget the drafts made of a sequence: ranks keep them by its row, which another one may have next."""
        if drafter := self._drafters.get(sequence.id):
            drafter.made = []

    def ended(self, sequence: Sequence) -> None:
        self._drafters.pop(sequence.id, None)
        self._look_at = 0  # another may have come
        self._answers.add(sequence.salt, sequence.tokens[sequence.prompt_len :])

    def took(self, sequences: int, query_len: int, tokens: int, seconds: float) -> None:
        """A step that decoded these sequences, and nothing else, ended so long after the one before."""
        self._times.add(sequences, query_len, seconds)
        if query_len > 1:
            self.seconds += seconds
            self.plain_seconds += self._times[sequences, 1] * tokens / sequences

    def stats(self) -> dict[str, Any]:
        """Counters for protocol.Stats."""
        return {
            "speculation": {source: counts.listed() for source, counts in self.counts.items()},
            "speculation_seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
        }
