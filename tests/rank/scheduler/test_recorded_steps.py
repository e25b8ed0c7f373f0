"""The choice of how many drafts are verified, over recorded texts, drafts and durations, against brute force.

recorded_steps.json says what is recorded. A text goes on as it did, whatever is drafted.
"""

import json
from pathlib import Path

import pytest
from phalanx.rank.scheduler.sequence import Sequence
from phalanx.rank.scheduler.speculation import Speculation

from .toy import request

RECORDED = json.loads(Path(__file__).with_name("recorded_steps.json").read_text())
MODEL_DRAFTS = 3


class Fixed(Speculation):
    """Verifies the same number of tokens in each step, where there are drafts."""

    def __init__(self, query_len, *given):
        super().__init__(*given)
        self.fixed = query_len

    def _possible(self, count):
        return self._query_lens

    def _best(self, count, chances, possible):
        return self.fixed


class Hindsight(Fixed):
    """Knows which drafts are right, and takes the number that gives the most tokens a second in each step."""

    def __init__(self, right, table, *given):
        super().__init__(max(given[0]), *given)
        self.right, self.table = right, table

    def choose(self, sequences):
        query_len, drafts = super().choose(sequences)
        count = len(sequences)

        def rate(some):
            return (count + sum(min(self.right(*one), some - 1) for one in drafts.items())) / self.table[count, some]

        best = max((q for q in (1, *self._query_lens) if q <= query_len), key=rate)
        return best, {name: one[: best - 1] for name, one in drafts.items()} if best > 1 else {}


class Replay:
    """Decodes the recorded texts, some at a time."""

    def __init__(self, device, together, model):
        self.texts = RECORDED["texts"]
        self.seconds = {(n, q): us * 1e-6 for n, q, us in RECORDED["steps"][device]}
        lens = sorted({q for n, q in self.seconds if n == together})
        self.given = [q for q in lens if not model or q <= 1 + MODEL_DRAFTS], 1000, "mtp" if model else ""
        self.together = together

    def right(self, name, drafts):
        """How many of the drafts behind a text's known tokens are its next ones."""
        answer, done = self.texts[int(name)]["answer"], self.done[name]
        return next((i for i, token in enumerate(drafts) if answer[done + i : done + i + 1] != [token]), len(drafts))

    def run(self, speculation):
        """Seconds of all texts."""
        total, waiting, running, self.done = 0.0, [*range(len(self.texts))], [], {}
        while waiting or running:
            while waiting and len(running) < self.together:
                name = str(waiting.pop(0))
                text = self.texts[int(name)]
                running.append(Sequence(request(name, text["prompt"], len(text["answer"])), int(name), []))
                self.done[name] = 0
            query_len, drafts = speculation.choose(running)
            wanted, tokens, count = speculation.model_drafts, 0, len(running)
            seconds = self.seconds[count, query_len]
            for one in [*running]:
                text, guessed = self.texts[int(one.id)], drafts.get(one.id, [])
                right = self.right(one.id, guessed)
                if guessed:
                    speculation.verified(one, len(guessed), right)
                one.tokens += text["answer"][self.done[one.id] : self.done[one.id] + right + 1]
                one.length, self.done[one.id] = len(one.tokens) + 1, self.done[one.id] + right + 1
                tokens += right + 1
                if self.done[one.id] >= len(text["answer"]):
                    running.remove(one)
                    speculation.ended(one)
                elif wanted:
                    speculation.made(one, self.drafted(text, self.done[one.id], wanted))
            total += seconds
            if query_len > 1 or not (wanted or speculation.model_follows):
                speculation.took(count, query_len, tokens, seconds)
        return total

    def drafted(self, text, done, wanted):
        """The head's drafts behind so many tokens of an answer."""
        follow, right = text["answer"][done : done + wanted], text["head"][done - 1]
        drafts = [token if i < right else token + 1 for i, token in enumerate(follow)]
        return drafts + [0] * (wanted - len(drafts))


@pytest.mark.parametrize("device, together, model", [
    ("cpu", 1, False), ("cpu", 2, False), ("cpu", 4, False), ("cpu", 1, True), ("cpu", 4, True), ("h200", 1, False),
])  # fmt: skip
def test_the_choice_is_nearly_as_good_as_brute_force(device, together, model):
    replay = Replay(device, together, model)
    chosen = replay.run(Speculation(*replay.given))
    measured = [(n, q, us * 1e-6) for n, q, us in RECORDED["steps"][device]]
    at_once = replay.run(Speculation(*replay.given, measured))
    fixed = {q: replay.run(Fixed(q, *replay.given)) for q in replay.given[0]}
    hindsight = replay.run(Hindsight(replay.right, replay.seconds, *replay.given))
    best = min(fixed.values())
    assert max(chosen, at_once) < 1.05 * best and max(chosen, at_once) < 1.02 * fixed[1]
    assert hindsight < 1.01 * min(chosen, at_once) and max(chosen, at_once) < 1.35 * hindsight
