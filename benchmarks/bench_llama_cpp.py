"""llama.cpp as a peer on CPUs: benchmarks/offline.py's decode and prefill parts, the same flags and JSON lines.

    pip install --target SITE llama-cpp-python gguf                 built for this machine; ten minutes on two cores
    python benchmarks/compare.py --peer benchmarks/bench_llama_cpp.py --peer-path SITE --config llama-99m --tp 2 \\
        --parts ab --batches 1,4,16 --our-args="--device cpu --dtype f32 --max-model-len 2048" --out FILE.jsonl

--tp is its number of threads. Weights are random of the config's shape, as offline.py's are: f32, or with --isq what
llama.cpp makes of them. The cache is f32 as well. Sequences of a batch decode together, as llama.cpp's own server does
it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from phalanx.benchmarks import parts
from phalanx.benchmarks.shapes import CONFIGS

CONTEXT = 2048
MAX_TOKENS = 512  # tokens of one call
QUIET = llama_cpp.llama_log_callback(lambda *_: None)  # called as long as the library is
FILE_TYPES = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4km": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def write_gguf(path: Path, config: dict[str, Any]) -> None:
    """Random weights of a Llama or dense Qwen3 shape, without a tokenizer."""
    hidden, layers, heads = (config[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    kv_heads, inner = config["num_key_value_heads"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // heads
    qwen = config["model_type"] == "qwen3"
    out = gguf.GGUFWriter(path, config["model_type"])
    out.add_block_count(layers)
    out.add_context_length(CONTEXT)
    out.add_embedding_length(hidden)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(dim)
    out.add_value_length(dim)
    out.add_rope_dimension_count(dim)
    out.add_rope_freq_base(config.get("rope_theta", 1e6))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("none")
    shapes = {"token_embd": (config["vocab_size"], hidden), "output_norm": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["output"] = config["vocab_size"], hidden
    for i in range(layers):
        layer = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_output": (hidden, heads * dim),
                 "attn_q": (heads * dim, hidden), "attn_k": (kv_heads * dim, hidden),
                 "attn_v": (kv_heads * dim, hidden),
                 "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}  # fmt: skip
        if qwen:
            layer |= {"attn_q_norm": (dim,), "attn_k_norm": (dim,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) * np.float32(0.02) if len(shape) > 1 else np.ones(shape)
        out.add_tensor(name + ".weight", values.astype(np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def quantize(path: Path, isq: str) -> Path:
    """Another file next to it, of types that llama.cpp chooses for each tensor; the embedding and the head, too."""
    made = path.with_stem(f"{path.stem}-{isq}")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[isq]
    if llama_cpp.llama_model_quantize(str(path).encode(), str(made).encode(), ctypes.byref(options)):
        raise SystemExit(f"bench_llama_cpp.py: llama.cpp could not make {isq} of the weights")
    return made


class Engine:
    def __init__(self, path: Path, threads: int, sequences: int):
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = CONTEXT * sequences
        asked.n_batch = asked.n_ubatch = MAX_TOKENS
        asked.n_seq_max = sequences
        asked.n_threads = asked.n_threads_batch = threads
        asked.type_k = asked.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, asked)
        if not model or not self._context:
            raise SystemExit("bench_llama_cpp.py: llama.cpp could not make the model or its context")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(max(MAX_TOKENS, sequences), 0, 1)
        self._random = np.random.default_rng(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [self._random.integers(1000, self._vocab - 1000, length).tolist() for _ in range(count)]

    def generate(self, prompts: list[list[int]], new: int) -> float:
        """Seconds for greedy text of `new` tokens after each prompt, all prompts of one length."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        start = time.perf_counter()
        chosen = []
        for sequence, ids in enumerate(prompts):
            for at in range(0, len(ids), MAX_TOKENS):
                part = ids[at : at + MAX_TOKENS]
                rows = [(token, at + i, sequence) for i, token in enumerate(part)]
                last = self._decode(rows, [len(rows) - 1])
            chosen += last
        for step in range(new - 1):
            at = len(prompts[0]) + step
            chosen = self._decode([(token, at, i) for i, token in enumerate(chosen)], range(len(chosen)))
        return time.perf_counter() - start

    def _decode(self, rows: list[tuple[int, int, int]], wanted: Any) -> list[int]:
        """rows: (token, position, sequence). The arg-max after each wanted row."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, sequence
            batch.logits[i] = i in wanted
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("bench_llama_cpp.py: llama_decode failed")
        shape = (self._vocab,)
        found = (llama_cpp.llama_get_logits_ith(self._context, i) for i in wanted)
        return [int(np.ctypeslib.as_array(logits, shape).argmax()) for logits in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=sorted(CONFIGS), default="llama-99m")
    parser.add_argument("--tp", type=int, default=2, help="threads")
    parser.add_argument("--isq", choices=sorted(FILE_TYPES), default="", help="f32 unless given")
    parser.add_argument("--parts", default="ab")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--reps", type=int, default=3)
    asked = parser.parse_args()
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    batches = [int(b) for b in asked.batches.split(",")]
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "model.gguf")
        write_gguf(path, CONFIGS[asked.config])
        if asked.isq:
            path = quantize(path, asked.isq)
        engine = Engine(path, asked.tp, max([*batches, 1]))
        about = dict(engine="llama.cpp", version=llama_cpp.__version__, config=asked.config, tp=asked.tp, isq=asked.isq)
        engine.generate(engine.prompts(1, 128), 16)

        def generate(lengths: list[int], outs: list[int]) -> float:
            return engine.generate(engine.prompts(len(lengths), lengths[0]), outs[0])

        if "a" in asked.parts:
            for batch in batches:
                print(json.dumps(about | parts.decode(generate, batch, 128, asked.reps)), flush=True)
        if "b" in asked.parts:
            print(json.dumps(about | parts.prefill(generate, 1, CONTEXT - 1, asked.reps)), flush=True)


if __name__ == "__main__":
    main()
