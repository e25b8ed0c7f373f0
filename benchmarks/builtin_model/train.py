"""Train the built-in model from nothing but this repository's files.

    python -m phalanx.benchmarks.builtin_model.train --out DIR [--steps N] [--tokenizer-only]

Everything is drawn from --seed: batch k holds the same conversations whichever process makes it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from functools import partial
from pathlib import Path

from ...launcher.builtin_model import DIRECTORY
from . import data


def work(seed: str, size: int, index: int):
    """Batch number `index`, in a worker process."""
    return data.batch(f"{seed}/{index}", size)


def batches(seed: str, size: int, count: int, workers: int):
    """All batches in order, made ahead by `workers` processes."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # the tokenizer's threads; the processes are enough
    with multiprocessing.get_context("forkserver").Pool(workers) as pool:
        yield from pool.imap(partial(work, seed, size), range(count))


def rate(step: int, steps: int, warm: int = 100, decay: float = 0.45) -> float:
    """Share of the full learning rate: a short rise, a plateau, a straight line to zero."""
    return min((step + 1) / warm, 1.0, (steps - step) / (steps * decay))


def to_device(made, device):
    """A batch as tensors: ids, document bounds, and the weight of each token's successor in the loss."""
    import numpy as np
    import torch

    ids, learn, ends = made
    bounds = np.full(data.MOST + 1, len(ids), np.int32)
    bounds[0], bounds[1 : len(ends) + 1] = 0, ends
    weight = np.where(np.roll(learn, -1) == 1, 1.0, 0.1).astype(np.float32)
    weight[ends - 1] = 0.0  # its successor belongs to another document
    weight[ids == 0] = 0.0
    tensors = (torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(bounds), torch.from_numpy(weight))
    return [tensor.to(device, non_blocking=True) for tensor in tensors]


def train(args) -> list[dict]:
    """Train, save the weights to args.out and return the losses on the way."""
    import torch

    from .model import build
    from .optimizer import Muon

    source = batches(f"train {args.seed}", args.tokens, args.steps, args.workers)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    model = build().to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    muon = Muon(matrices, args.rate)
    adam = torch.optim.AdamW(others, lr=args.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses = torch.compile(model.losses) if device.type == "cuda" else model.losses
    history: list[dict] = []
    started = time.time()
    seen = torch.zeros(2, device=device)
    for step, made in enumerate(source):
        ids, bounds, weight = to_device(made, device)
        with torch.autocast(device.type, torch.bfloat16):
            found = losses(ids, bounds, data.CONTEXT)
        loss = (found * weight).sum() / weight.sum()
        loss.backward()
        scale = rate(step, args.steps)
        muon.scale, adam.param_groups[0]["lr"] = scale, args.embedding_rate * scale
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        muon.step()
        adam.step()
        model.zero_grad(set_to_none=True)
        answers = (weight == 1.0).float()
        seen += torch.stack([(found.detach() * answers).sum(), answers.sum()])
        if step % args.every == args.every - 1 or step == args.steps - 1:
            line = {
                "step": step + 1,
                "seconds": round(time.time() - started, 1),
                "loss": round((seen[0] / seen[1]).item(), 4),
            }
            line["tokens"] = (step + 1) * args.tokens
            history.append(line)
            print(json.dumps(line), flush=True)
            seen.zero_()
        if time.time() - started > args.limit:  # an unfinished run is for looking at, not for keeping
            print(f"stopped by --limit at step {step + 1}", flush=True)
            break
    save(model, args.out)
    return history


def save(model, directory: Path) -> None:
    """Write model.safetensors."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.tensors(), str(directory / "model.safetensors"), metadata={"format": "pt"})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="where model.safetensors goes")
    parser.add_argument("--steps", type=int, default=6800)
    parser.add_argument("--tokens", type=int, default=131072, help="in a batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.02, help="of Muon")
    parser.add_argument("--embedding-rate", type=float, default=0.003)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--every", type=int, default=100, help="steps between two lines of progress")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="items of each skill to try afterwards")
    parser.add_argument("--tokenizer-only", action="store_true", help="train tokenizer.json and stop")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.tokenizer_only:
        from . import tokenizer

        vocab = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        tokenizer.save(tokenizer.train(data.plain_texts("tokenizer", 20000), vocab), args.out)
        return
    started = time.time()
    history = train(args)
    print(f"trained in {time.time() - started:.0f} s", flush=True)
    report: dict = {"losses": history, "seconds": round(time.time() - started)}
    if args.evaluate:
        from . import check

        report |= check.everything(args.out, args.evaluate, args.device)
    (args.out / "training.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
