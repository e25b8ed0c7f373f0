"""vLLM as a peer: parts a, b and c of benchmarks/offline.py by vLLM's `LLM.generate`, the same flags and JSON lines.

    pip install --target SITE vllm                                  for the Python that runs this; several GB
    python benchmarks/compare.py --peer benchmarks/bench_vllm.py --peer-path SITE --config llama3-8b --out FILE.jsonl

Both engines get token ids and give greedy tokens: no tokenizer, no HTTP, no prefix cache. After the start vLLM's random
weights are replaced by numbers distributed as offline.py's: matrices uniform with deviation 1 / sqrt(inputs), norms 1,
biases 0, decays of Mamba -1. vLLM's own lie within 0.001. With those tokens of a prompt become alike, so that all
choose the same experts and a GPU takes less power: prompts, mixed loads and models of experts are too fast. Weights of
8 bits and fewer (--quantized) stay as vLLM makes them, so compare only their decode steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from phalanx.benchmarks import parts
from phalanx.benchmarks.shapes import CONFIGS, QUANTIZED


def make_uniform(model: Any) -> int:
    """Fills the weights in place, on each of vLLM's workers; how many. It is sent there, so its imports are in it."""
    import torch

    count = 0
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.element_size() < 2 or "scale" in name:
            continue
        count += 1
        if weight.dim() < 2:
            # Mamba's A is below 0, or its state would grow without end.
            weight.data.fill_(0.0 if name.endswith("bias") else -1.0 if name.endswith(".A") else 1.0)
            continue
        # One seed on all workers: what each of them holds whole, such as a router, has to be the same on all.
        generator = torch.Generator(device=weight.device).manual_seed(count)
        limit = (3 / weight.shape[-1]) ** 0.5
        for part in weight.data if weight.dim() > 2 else [weight.data]:  # in parts: experts are large
            part.uniform_(-limit, limit, generator=generator)
    return count


class Engine:
    def __init__(self, model: str, vocab_size: int, asked: argparse.Namespace):
        import vllm  # type: ignore[import-not-found]

        self.version = vllm.__version__
        self._vllm, self._vocab, self._random = vllm, vocab_size, random.Random(0)
        settings: dict[str, Any] = dict(
            model=model, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", seed=0,
            tensor_parallel_size=asked.tp, max_model_len=asked.max_model_len, enable_prefix_caching=False,
            generation_config="vllm", disable_log_stats=True,
        )  # fmt: skip
        self._llm = vllm.LLM(**(settings | json.loads(asked.llm)))

    def generate(self, lengths: list[int], outs: list[int]) -> float:
        prompts = [{"prompt_token_ids": self._ids(length)} for length in lengths]
        sampling = [
            self._vllm.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=out, detokenize=False)
            for out in outs
        ]
        start = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = [len(answer.outputs[0].token_ids) for answer in answers]
        if made != outs:
            raise SystemExit(f"bench_vllm.py: {sum(outs)} tokens were asked for, vLLM gave {sum(made)}")
        return seconds

    def make_uniform(self) -> None:
        self._llm.apply_model(make_uniform)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(1000, self._vocab - 1000) for _ in range(length)]


def main() -> None:
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b", help=f"{', '.join(sorted(CONFIGS))}, or a config.json")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--parts", default="abc")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--n-mixed", type=int, default=512)
    parser.add_argument("--quantized", choices=QUANTIZED, help="a checkpoint that is quantised so")
    parser.add_argument("--llm", default="{}", metavar="JSON", help="more arguments of vllm.LLM")
    asked = parser.parse_args()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # or vLLM sends its workers no function
    config = CONFIGS.get(asked.config) or json.loads(Path(asked.config).read_text())
    if asked.quantized:
        config |= {"quantization_config": QUANTIZED[asked.quantized]}
    with tempfile.TemporaryDirectory() as made:
        Path(made, "config.json").write_text(json.dumps(config))
        engine = Engine(made, config["vocab_size"], asked)
        about = dict(engine="vllm", version=engine.version, config=asked.config, tp=asked.tp)

        def say(line: dict[str, Any]) -> None:
            print(json.dumps(about | line), flush=True)

        engine.generate([8], [1])
        say(dict(what="start", seconds=round(time.time() - started, 1)))
        engine.make_uniform()
        engine.generate([128] * 4, [16] * 4)  # first-call costs
        if "a" in asked.parts:
            for batch in asked.batches.split(","):
                say(parts.decode(engine.generate, int(batch), 128, asked.reps))
        if "b" in asked.parts:
            for batch, length in parts.prefills(asked.max_model_len):
                say(parts.prefill(engine.generate, batch, length, asked.reps))
        if "c" in asked.parts:
            for line in parts.mixed(engine.generate, asked.n_mixed, asked.max_model_len, asked.reps):
                say(line)


if __name__ == "__main__":
    main()
