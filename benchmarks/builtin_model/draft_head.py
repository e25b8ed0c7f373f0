"""Train the built-in model's head for multi-token prediction, its trunk frozen, or say how good it is.

    python -m phalanx.benchmarks.builtin_model.draft_head --out FILE [--minutes 30] [--resume FILE]
    python -m phalanx.benchmarks.builtin_model.draft_head --join FILE
    python -m phalanx.benchmarks.builtin_model.draft_head --measure [FILE]

The head is what Qwen's checkpoints ship as `mtp.*`: a layer of the model's own kind between a linear of two normed
inputs and a norm. It learns the trunk's own distribution of the token after next and, from its own output, of the two
behind that one: so it is trained as it drafts. Only the answers' tokens are learned.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ...launcher.builtin_model import DIRECTORY
from ...rank import protocol
from ...rank.scheduler.ngram import Answers, Ngrams
from ...rank.scheduler.sequence import Sequence
from . import check, data, heldout
from .model import Layer, Model, Norm, linear, rotate
from .optimizer import Muon

Keys = tuple[Tensor, Tensor]  # and values, [tokens, heads, head] each
DEPTH = 3  # tokens that it is trained to draft in a row
WEIGHTS = 1.0, 0.7, 0.5  # of the losses of these
SAMPLED = (1.0, 1.0), (1.0, 0.95), (0.7, 0.95)  # temperatures, and top_p of each, for which `measure` looks


class Head(nn.Module):
    """Attribute names are the checkpoint's, below `mtp.`."""

    def __init__(self, config: dict):
        super().__init__()
        hidden = config["hidden_size"]
        self.config = config
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = Norm(hidden), Norm(hidden), Norm(hidden)
        self.fc = linear(hidden, 2 * hidden, (2 * hidden) ** -0.5)
        self.layers = nn.ModuleList([Layer(config)])

    @property
    def layer(self) -> Any:
        """The head's one layer, a Layer."""
        return self.layers[0]

    def begin_as(self, trunk: Model) -> None:
        """Start from the trunk's last layer, which reads its hidden state as it is."""
        self.layer.load_state_dict(trunk.layers[-1].state_dict())
        self.norm.load_state_dict(trunk.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
            self.fc.weight[:, self.config["hidden_size"] :] += torch.eye(self.config["hidden_size"])

    def inputs(self, embedded: Tensor, before: Tensor) -> Tensor:
        return self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)), -1))

    def keys(self, x: Tensor, places: Tensor) -> Keys:
        """Keys and values [tokens, heads, head] of the layer's inputs."""
        attention = self.layer.self_attn
        normed = self.layer.input_layernorm(x)
        k, v = (p(normed).view(len(x), -1, attention.head) for p in (attention.k_proj, attention.v_proj))
        return rotate(attention.k_norm(k), self.rope(places)).to(v.dtype), v

    def rope(self, places: Tensor) -> tuple[Tensor, Tensor]:
        half = self.config["head_dim"] // 2
        steps = torch.arange(half, dtype=torch.float32) / half
        angles = places.float()[:, None, None] * self.config["rope_theta"] ** -steps
        return angles.cos(), angles.sin()

    def attend(self, x: Tensor, at: Tensor, starts: Tensor, depth: int, first: Keys, own: list[Keys]) -> Tensor:
        """The hidden states, behind the norm, of tokens `at`, in the documents that begin at `starts`. first: keys and
        values of all tokens, of which one sees those of its document up to itself. own: those that each has made since
        in drafting, and sees beside."""
        layer, attention = self.layer, self.layer.self_attn
        q = attention.q_norm(attention.q_proj(layer.input_layernorm(x)).view(len(x), -1, attention.head))
        q = rotate(q, self.rope(at - starts + depth)) * attention.head**-0.5
        read, beside = list[Tensor](), [(q * k).sum(-1).float() for k, _ in own]
        for start, count in zip(*(one.tolist() for one in starts.unique_consecutive(return_counts=True)), strict=True):
            done = sum(len(one) for one in read)
            here = slice(done, done + count)
            end = int(at[here][-1]) + 1
            keys, values = (one[start:end].transpose(0, 1) for one in first)
            scores = (q[here].transpose(0, 1) @ keys.mT).float()
            later = torch.arange(start, end) > at[here, None]
            scores = [scores.masked_fill(later, -torch.inf), *(one[here].T[:, :, None] for one in beside)]
            shares = torch.cat(scores, -1).softmax(-1).to(q.dtype)
            found = (shares[:, :, : end - start] @ values).transpose(0, 1)
            for i, (_, v) in enumerate(own):
                found = found + shares[:, :, end - start + i].T[:, :, None] * v[here]
            read.append(found)
        x = x + attention.o_proj(torch.cat(read).flatten(1).to(x.dtype))
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))

    def tensors(self) -> dict[str, Tensor]:
        """The head in bf16, by its checkpoint's names."""
        return {
            f"mtp.{name}": value.detach().to(torch.bfloat16).contiguous() for name, value in self.state_dict().items()
        }


class Batch(NamedTuple):
    """Documents one behind the other, and what the trunk makes of them."""

    ids: Tensor  # [tokens]
    hidden: Tensor  # [tokens, hidden], behind the trunk's norm
    starts: Tensor  # [tokens], where each one's document begins
    at: Tensor  # [places] from which tokens of answers are drafted, with as many behind them as are drafted


def read(trunk: Model, documents: list[tuple[list[int], list[bool]]]) -> Batch:
    bounds = torch.tensor([0, *(len(ids) for ids, _ in documents)]).cumsum(0)
    ids = torch.tensor([token for ids, _ in documents for token in ids])
    starts = bounds[:-1].repeat_interleave(bounds.diff())
    pairs = zip(bounds.tolist(), documents, strict=False)
    at = [start + i for start, (ids, learn) in pairs for i in range(len(ids) - DEPTH - 1) if learn[i + 2]]
    with torch.no_grad():
        hidden = trunk(ids, bounds, int(bounds.diff().max()))
    return Batch(ids, hidden, starts, torch.tensor(at, dtype=torch.int64))


def drafted(head: Head, trunk: Model, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """The head's logits of the token after next, then of those behind, at each place of a batch, and the trunk's of the
    same tokens. The tokens between are the document's."""
    ids, hidden, starts, at = batch
    every = head.inputs(trunk.embed_tokens(ids.roll(-1)), hidden)  # a document's last means nothing, and is not seen
    first, own, before, x = head.keys(every, torch.arange(len(ids)) - starts), list[Keys](), every, every[at]
    for step in range(DEPTH):
        if step:
            x = head.inputs(trunk.embed_tokens(ids[at + step + 1]), before)
            own.append(head.keys(x, at - starts[at] + step))
        before = head.attend(x, at, starts[at], step, first, own)
        with torch.no_grad():
            target = trunk.logits(hidden[at + step + 1]).float()
        yield F.linear(before, trunk.embed_tokens.weight.detach().to(before.dtype)).float(), target


def documents(seed: str, tokens: int) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Batches of documents of so many tokens or more, without end."""
    for number in itertools.count():
        found, d = list[tuple[list[int], list[bool]]](), data.Draw(f"{seed}/{number}")
        while sum(len(ids) for ids, _ in found) < tokens:
            found += data.documents(d, 8)
        yield found


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    trunk = check.load(DIRECTORY, "cpu")
    trunk.requires_grad_(False)
    head = Head(trunk.config)
    head.begin_as(trunk)
    if args.resume:
        head.load_state_dict({name.removeprefix("mtp."): x.float() for name, x in load_file(args.resume).items()})
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim == 1]
    muon, adam = Muon(matrices, args.rate), torch.optim.AdamW(others, lr=args.rate / 7, betas=(0.9, 0.95))
    started, seen, source, kept = time.time(), torch.zeros(DEPTH + 1), documents(args.seed, args.tokens), list[Batch]()
    for number in itertools.count():
        share = (time.time() - started) / (60 * args.minutes)
        if share >= 1:
            break
        muon.scale = min(1.0, (number + 1) / 20, (1 - share) / 0.6)
        adam.param_groups[0]["lr"] = args.rate / 7 * muon.scale
        if number % args.times == 0:  # the trunk takes most of the time: each batch is learned several times
            kept.append(read(trunk, next(source)))
        batch = kept[-1] if number % args.times == 0 else kept[int(torch.randint(len(kept), ()))]
        loss = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for step, (logits, target) in enumerate(drafted(head, trunk, batch)):
                found = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="batchmean")
                loss = loss + WEIGHTS[step] * found
                seen[step] += found.detach()
        loss.backward()
        seen[-1] += 1
        muon.step()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.step()
        head.zero_grad(set_to_none=True)
        if number % args.every == args.every - 1:
            losses = [round(one, 4) for one in (seen[:-1] / seen[-1]).tolist()]
            print(json.dumps({"step": number + 1, "minutes": round(share * args.minutes, 1), "kl": losses}), flush=True)
            seen.zero_()
            save_file(head.tensors(), args.out)
    save_file(head.tensors(), args.out)


def limited(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Logits [places, vocab] as they are sampled: of the likeliest tokens that have a share top_p together."""
    logits = logits / temperature
    shares, order = logits.softmax(-1).sort(-1, descending=True)
    out = shares.cumsum(-1) - shares >= top_p
    return logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)


class Acceptance:
    """How often drafts are right, by their position, where those before were right."""

    def __init__(self) -> None:
        self._make = torch.Generator().manual_seed(0)
        self._sums: dict[str, Tensor] = {}

    def add(self, position: int, targets: Tensor, drafted: Tensor) -> None:
        """Logits [places, vocab] of both; of a draft that no model makes all but one are -inf."""
        self._count("greedy", position, targets.argmax(-1) == drafted.argmax(-1))
        for temperature, top_p in SAMPLED:
            p, q = limited(targets, temperature, top_p), limited(drafted, temperature, top_p)
            noise = -torch.rand(p.shape, generator=self._make).log().neg().log()
            name = f"temperature {temperature}, top_p {top_p}"
            self._count(f"{name}: bound", position, torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
            self._count(f"{name}: coupled", position, (p + noise).argmax(-1) == (q + noise).argmax(-1))

    def _count(self, name: str, position: int, shares: Tensor) -> None:
        sums = self._sums.setdefault(name, torch.zeros(2, DEPTH))
        sums[:, position] += torch.tensor([shares.sum(), len(shares)])

    def listed(self) -> dict[str, list[float]]:
        return {name: (right / seen).tolist() for name, (right, seen) in self._sums.items()} | {
            "places": self._sums["greedy"][1].tolist()
        }


def repeated(ids: list[int], first: int, targets: Tensor, found: Acceptance) -> None:
    """Add what a document's own n-grams draft of its tokens from `first` on. targets: the trunk's logits."""
    sequence = Sequence(protocol.Request("", protocol.pack_u32(ids[:first]), protocol.SamplingParams(1)), 0, [])
    ngrams = Ngrams(sequence, Answers(), [])
    for at in range(first, len(ids)):
        ngrams.follow()
        for position, draft in enumerate(ngrams.draft(DEPTH)):
            if at + position == len(ids):
                break
            known = torch.full((1, targets.shape[1]), -torch.inf)
            known[0, draft] = 0.0
            found.add(position, targets[at + position - 1 : at + position], known)
            if draft != ids[at + position]:
                break
        sequence.tokens.append(ids[at])


@torch.no_grad()
def measure(file: Path, count: int) -> dict[str, dict[str, list[float]]]:
    """Acceptance of the head's and of n-grams' drafts, by position, over answers of held-out conversations where the
    drafts before were right: the share of greedy drafts that are the trunk's greedy token, and, of sampled ones, the
    shared mass of both distributions, which is the bound of any coupling of the two (sum over tokens of min(p, q)), and
    the share of drafts that equal the trunk's token where both are drawn with the same noise."""
    trunk = check.load(DIRECTORY, "cpu").float()
    head, of_head, of_ngrams = Head(trunk.config), Acceptance(), Acceptance()
    found = {name.removeprefix("mtp."): x.float() for name, x in load_file(file).items() if name.startswith("mtp.")}
    head.load_state_dict(found)
    for ids, learn in heldout.documents(count):
        batch = read(trunk, [(ids, learn)])
        if not len(batch.at):
            continue
        for step, (logits, target) in enumerate(drafted(head, trunk, batch)):
            of_head.add(step, target, logits)
        repeated(ids, learn.index(True), trunk.logits(batch.hidden).float(), of_ngrams)
    return {"head": of_head.listed(), "ngram": of_ngrams.listed()}


def join(head: Path) -> None:
    """Put a trained head into the built-in model's file, in place of the one that is there."""
    file = DIRECTORY / "model.safetensors"
    trunk = {name: x for name, x in load_file(file).items() if not name.startswith("mtp.")}
    save_file(trunk | load_file(head), file, metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=DIRECTORY / "model.safetensors", help="to measure")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--join", type=Path, metavar="FILE", help="put this head into the built-in model")
    parser.add_argument("--items", type=int, default=200, help="held-out documents to measure with")
    parser.add_argument("--out", type=Path, default=Path("head.safetensors"))
    parser.add_argument("--resume", type=Path, help="a head to go on from")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tokens", type=int, default=4096, help="in a batch")
    parser.add_argument("--times", type=int, default=3, help="that a batch is learned")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.01, help="of Muon")
    parser.add_argument("--seed", default="draft")
    parser.add_argument("--every", type=int, default=20, help="batches between two lines of progress")
    args = parser.parse_args()
    if args.join:
        join(args.join)
    elif args.measure:
        print(json.dumps(measure(args.file, args.items)))
    else:
        train(args)


if __name__ == "__main__":
    main()
