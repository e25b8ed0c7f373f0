"""Try a checkpoint on the held-out exercises without a server: greedy, many at a time, where it was trained.

    python -m phalanx.benchmarks.builtin_model.check DIR [--device cpu] [--items 0]

Prints the held-out perplexity and, unless --items is 0, the table of skills.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from ...launcher.builtin_model import DIRECTORY
from . import data, heldout
from .item import EMPTY_THOUGHT, Item, judge, prompt, split_reply
from .model import Model, build

END = 2
TOKENS = 131072  # in one forward pass


def load(directory: Path, device: str) -> Model:
    """The saved weights, in bf16 as they will be served."""
    model = build()
    stored = load_file(directory / "model.safetensors").items()
    own = {name.removeprefix("model."): value for name, value in stored if not name.startswith("mtp.")}
    model.load_state_dict(own)
    return model.to(device, torch.bfloat16).eval()


def pack(rows: list[list[int]], device: str):
    """Rows of ids as one row and its bounds."""
    flat = torch.tensor([token for row in rows for token in row], device=device)
    bounds = torch.tensor([0, *(len(row) for row in rows)], device=device).cumsum(0).int()
    return flat, bounds


@torch.no_grad()
def greedy(model: Model, prompts: list[list[int]], limit: int, device: str) -> list[list[int]]:
    """Greedy continuations. Nothing is cached: at this size, computing the prompt again costs less than code would."""
    rows = [list(prompt) for prompt in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(limit):
        active = [
            index
            for index in range(len(rows))
            if (not made[index] or made[index][-1] != END) and len(rows[index]) < 2048
        ]
        if not active:
            break
        while active:
            group: list[int] = []
            size = 0
            while active and size + len(rows[active[0]]) <= TOKENS:
                size += len(rows[active[0]])
                group.append(active.pop(0))
            flat, bounds = pack([rows[index] for index in group], device)
            hidden = model(flat, bounds, 2048)[bounds[1:].long() - 1]
            for index, token in zip(group, model.logits(hidden).argmax(-1).tolist(), strict=True):
                rows[index].append(token)
                made[index].append(token)
    return made


def answers(model: Model, items: list[Item], device: str, think: bool, limit: int = 320) -> list[dict]:
    """Each exercise with the model's answer and whether it is right."""
    tokenizer = data.tokenizer()
    texts = [
        prompt(item.messages, item.tools) + "<|im_start|>assistant\n" + EMPTY_THOUGHT * (not think) for item in items
    ]
    found = []
    for item, ids in zip(
        items, greedy(model, [tokenizer.encode(text).ids for text in texts], limit, device), strict=True
    ):
        ended = bool(ids) and ids[-1] == END
        thought, content, calls = split_reply(
            tokenizer.decode([one for one in ids if one != END], skip_special_tokens=False)
        )
        found.append(
            {
                "question": item.messages[-1]["content"],
                "wanted": item.reply(),
                "thought": thought,
                "content": content,
                "calls": calls,
                "ended": ended,
                "right": judge(item, content, calls, ended),
                "skill": item.skill,
            }
        )
    return found


@torch.no_grad()
def perplexity(model: Model, device: str, count: int = 400) -> dict[str, float]:
    """Perplexity of the held-out text: of the answers alone and of all tokens but each document's first."""
    answer, everything = [], []
    for ids, learn in heldout.documents(count):
        flat, bounds = pack([ids], device)
        losses = model.losses(flat, bounds, 2048)[:-1].float().cpu()
        everything.append(losses)
        answer.append(losses[torch.tensor(learn[1:])])
    return {
        "answers": math.exp(torch.cat(answer).mean()),
        "all": math.exp(torch.cat(everything).mean()),
        "tokens": sum(map(len, everything)),
        "answer_tokens": sum(map(len, answer)),
    }


def everything(directory: Path, count: int, device: str) -> dict:
    """The table of skills, thinking and not, perplexity, and all answers."""
    model = load(directory, device)
    report: dict = {"perplexity": perplexity(model, device), "table": {}, "answers": {}}
    print(report["perplexity"], flush=True)
    for skill, least, _ in heldout.SKILLS if count else ():
        exercises = heldout.items(skill, count)
        shares = []
        for think in (True, False):
            tried = answers(model, exercises, device, think)
            shares.append(sum(one["right"] for one in tried) / len(tried))
            kept = [one for one in tried if not one["right"]][:25]
            report["answers"][f"{skill}, {'thinking' if think else 'not thinking'}"] = (
                kept + [one for one in tried if one["right"]][:12]
            )
        report["table"][skill] = {"least": least, "thinking": shares[0], "not thinking": shares[1]}
        print(f"{skill:32} at least {least:.0%}  thinking {shares[0]:.1%}  not thinking {shares[1]:.1%}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, nargs="?", default=DIRECTORY)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--items", type=int, default=200, help="exercises of each skill")
    args = parser.parse_args()
    everything(args.directory, args.items, args.device)


if __name__ == "__main__":
    main()
