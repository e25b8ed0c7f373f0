"""The steps that the start runs: of the most memory, and of every kernel."""

import json
import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.attention import attention, cudnn, mla
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.device import DeviceCaps
from phalanx.kernels.gemm import linear, pipelined_gemm
from phalanx.kernels.rope.rope import CosSin, CurrentKV
from phalanx.rank.model.cache_spec import E4M3, Indexed, PagedKV, PagedLatent
from phalanx.rank.model.load import load
from phalanx.rank.worker import profile_run
from phalanx.rank.worker.sampler import Sampler
from phalanx.rank.worker.upload import Upload

BLOCK = 16
CPU = torch.device("cpu")


def model(longest):
    return SimpleNamespace(
        max_model_len=longest, cache_specs=lambda: [PagedKV(2, 8, 8)] * 3, dtype=torch.bfloat16, modules=lambda: ()
    )


def test_the_largest_step():
    batch = profile_run.prompts(model(24), 64, BLOCK, Upload(CPU))
    assert batch.query_lens == batch.kv_lens == [24, 24, 16] and batch.num_decodes == 0
    assert batch.positions.tolist() == batch.slots.tolist() == [*range(24), *range(24), *range(16)]
    assert batch.block_tables.tolist() == [[0, 1]] * 3 and not batch.ids.any() and len(batch.ids) == 64
    assert [[x.shape for x in pair] for pair in batch.caches] == [[(2, BLOCK, 2, 8)] * 2] * 3
    assert batch.sampled is None  # all rows go through all layers
    assert profile_run.prompts(model(100), 50, BLOCK, Upload(CPU)).query_lens == [50]
    rest = profile_run.prompts(model(21), 64, BLOCK, Upload(CPU))
    assert rest.query_lens == [1, 21, 21, 21] and rest.num_decodes == 1, "single tokens come first"


@pytest.mark.parametrize("min_tokens, parts", [(0, 1), (128, 1), (16, 2)])
def test_a_step_that_is_timed(min_tokens, parts, monkeypatch):
    """Whole, and in two microbatches where both are long enough."""
    monkeypatch.setattr("phalanx.rank.worker.batch_builder.TILE", 16)
    timed = model(24)
    timed.forward = lambda batches, hidden: seen.append([batch.query_lens for batch in batches])
    seen, mesh = [], SimpleNamespace(first=True)
    assert profile_run.step_seconds(timed, mesh, 72, BLOCK, CPU, None, min_tokens) >= 0
    assert len(seen) == profile_run.TIMED and all(one == seen[0] for one in seen)
    assert sum(map(sum, seen[0])) == 72 and len(seen[0]) == parts


@pytest.mark.parametrize("longest", [2, 100])
def test_the_step_of_last_tokens_only(longest):
    batch = profile_run.last_token_only(model(100), longest, BLOCK, Upload(CPU))
    assert batch.query_lens == [2] and batch.sample_at.tolist() == [1]
    assert batch.sampled.kv_lens == [longest] and batch.sampled.positions.tolist() == [1]
    assert batch.sampled.num_decodes == 1 and batch.sampled.lengths.tolist() == [2]


def test_small_steps():
    found = [
        (step.query_lens, step.kv_lens, step.num_decodes)
        for step in profile_run.small_steps(model(300), 9, BLOCK, Upload(CPU))
    ]
    assert found == [
        *(([count], [count], 0) for count in (2, 3, 9)),
        *(([1], [longest], 1) for longest in (1, 257)),
        *(([1, 2], [longest, 2], 1) for longest in (2, 300)),
    ]  # fmt: skip


def test_small_steps_of_latents():
    """Whose short chunks on long contexts have a kernel of their own, and decoding sequences one for each range."""
    latents = model(300)
    latents.cache_specs = lambda: [PagedLatent(24)]
    steps = profile_run.small_steps(latents, 40, BLOCK, Upload(CPU))
    found = [(step.query_lens, step.kv_lens, step.num_decodes) for step in steps]
    assert ([2], [300], 0) in found
    for count in (17, 33):
        assert ([1] * count, [300] * count, count) in found
        assert ([1] * count + [2], [300] * count + [2], count) in found
    assert max(len(lens) for lens, _, _ in found) == 34  # no step has more tokens than steps may have


def indexed(longest, topk):
    """A model of which half of the layers have an indexer."""
    specs = [Indexed(PagedLatent(24), PagedLatent(8), topk), PagedLatent(24)]
    return SimpleNamespace(max_model_len=longest, cache_specs=lambda: specs, dtype=torch.bfloat16, modules=lambda: ())


def test_small_steps_of_latents_that_an_indexer_chooses():
    """Shorter contexts are read whole, and longer ones chosen from: by decoding sequences and in the largest step."""
    of = indexed(300, 32), 40, BLOCK, Upload(CPU)
    steps = [*profile_run.small_steps(*of), *profile_run.indexed_steps(*of, None)]
    found = [(step.query_lens, step.kv_lens, step.num_decodes) for step in steps]
    for length in (32, 300):
        assert ([2], [length], 0) in found and ([1] * 33 + [2], [length] * 33 + [2], 33) in found
    assert ([40], [300], 0) in found and ([32, 8], [32, 8], 0) in found
    for step in steps:  # an indexer reads the whole context of a prompt, as the host has its length
        assert max(step.kv_lens[step.num_decodes :], default=0) <= step.block_tables.shape[1] * BLOCK
        assert max(step.block_tables.max(), step.slots.max() // BLOCK) < len(step.caches[0][0])
    assert not [*profile_run.indexed_steps(indexed(300, 300), 40, BLOCK, Upload(CPU), None)]


def test_prompts_run_with_contexts_that_an_indexer_chooses_from(tmp_path):
    """Through a model whose layers share one."""
    config = {
        "model_type": "glm_moe_dsa", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 300,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "index_n_heads": 2, "index_head_dim": 16, "index_topk": 32, "indexer_types": ["full", "shared"],
        "mlp_layer_types": ["dense"] * 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 2, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = []

    def rank(world):
        one = load(tmp_path, mesh.build(world, 1, 1), "cpu", "f32", max_model_len=300, load_format="dummy")
        of = one, 40, BLOCK, Upload(CPU)
        for step in (*profile_run.small_steps(*of), *profile_run.indexed_steps(*of, None)):
            if not step.num_decodes:
                assert one.forward([step], None).shape == (len(step.ids), 32)
                chosen.append(step.selection is not None)
        return profile_run.read_whole(one.cache_specs(), one.max_model_len)

    assert threads.run(rank, 1) == [32]
    assert chosen[-2:] == [True, False] and chosen.count(True) == 3


class Launches:
    """In a Triton kernel's place: keeps what each launch would have compiled, from the arguments as Triton has it."""

    def __init__(self, kernel, found):
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        key = [self.kernel.__name__, *sorted(options.items())]
        for parameter, x in zip(self.kernel.params, args, strict=True):
            if parameter.is_constexpr:
                key.append(x)
            elif isinstance(x, torch.Tensor):
                key.append(x.dtype)
            elif isinstance(x, int) and not parameter.do_not_specialize:
                key.append((x == 1, x % 16 == 0))
        self.found.add(tuple(key))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents_of_any_count_are_absorbed_by_kernels_of_the_start(monkeypatch, dtype):
    mla_triton = pytest.importorskip("phalanx.kernels.attention.mla_triton", exc_type=ImportError)
    from phalanx.kernels.attention import mla_store_triton

    asked = set()
    for module, name in ((mla_store_triton, "absorb_rotated_kernel"), (mla_triton, "values_kernel")):
        monkeypatch.setattr(module, name, Launches(getattr(module, name), asked))
    q, queries, mixed, up, out = (
        torch.empty(*shape, dtype=dtype, device="meta")
        for shape in ((513, 16, 192), (513, 16, 576), (513, 16, 512), (16, 256, 512), (513, 16, 128))
    )

    def absorb(tokens):
        mla_store_triton.absorb_rotated(q[:tokens], up, queries[:tokens])
        mla_triton.values(mixed[:tokens], up, 128, out[:tokens])

    for count in (1, *profile_run.DECODING):
        absorb(count)
    compiled = set(asked)
    for count in range(1, mla.TRITON_TOKENS + 1):
        absorb(count)
    assert asked == compiled


class Source:
    """A draft model: how many rows it was given."""

    FOLLOWS, max_model_len = True, 300

    def __init__(self):
        self.ran = []

    def cache_specs(self):
        return [PagedKV(2, 8, 8)]

    def read(self, hidden):
        return hidden

    def forward(self, batch, before):
        self.ran.append(len(batch.ids))
        return before

    def logits(self, hidden):
        self.ran.append(len(hidden))


class Attention(torch.nn.Module):
    """A model of one layer of Triton's attention, as on a GPU whose cache no copy engine reads."""

    def __init__(self, monkeypatch, longest, dtype, dim, window, stages=1):
        super().__init__()
        paged = pytest.importorskip("phalanx.kernels.attention.attention_triton", exc_type=ImportError)
        self.max_model_len, self.dtype, self.received_size = longest, dtype, 8
        self.dim, self.scores = dim, AttentionParams(0.1, window)
        self.asked = set()
        for name in ("decode_kernel", "prefill_kernel"):
            monkeypatch.setattr(paged, name, Launches(getattr(paged, name), self.asked))
        monkeypatch.setattr(paged, "device_caps", lambda _: DeviceCaps(108, "sm_80", False, False, False))
        monkeypatch.setattr(cudnn, "_whole_prompt", lambda *_: None)  # which compiles nothing
        chosen = [one for one in attention.CANDIDATES["cuda"] if one.name in ("cudnn.py", "attention_triton.py")]
        monkeypatch.setitem(attention.CANDIDATES, "cuda", chosen)

    def cache_specs(self):
        return [PagedKV(2, self.dim, self.dim)]

    def forward(self, batches, hidden=None):
        (batch,) = batches
        for one in (batch, batch.sampled):
            if one is None:
                continue
            count, dim = len(one.positions), self.dim
            merged = torch.empty(count, 8, dim, dtype=self.dtype, device="meta")
            q, k, v = merged.split([4, 2, 2], 1)
            cache = torch.empty(2, 9, BLOCK, 2, dim, dtype=self.dtype, device="meta").unbind()
            turn = CosSin(*torch.empty(2, count, 1, dim, device="meta"))
            new = CurrentKV(k, v, turn, None, one.slots)
            if attention.supports_one_kernel(q, new, cache, one):
                attention.decode_current(q, new, cache, one, self.scores)
            else:
                attention.paged_attention(q, *cache, one, self.scores)
        return hidden


def served(longest, budget):
    """Tokens and lengths of the sequences of steps that may come: every prompt alone, chunks, mixtures, decoding."""
    draw = random.Random(3)
    most = min(longest, budget)
    for count in {*range(1, min(most, 200) + 1), *range(200, most + 1, 50), most}:
        yield [count], [count]
        yield [count], [draw.randint(count, longest)]
    for length in {*range(1, longest + 1, 16), *(n for n in (256, 257, 512, 513, longest) if n <= longest)}:
        for count in (1, 3, 40):
            yield [1] * count, [length] * count
    for _ in range(100):
        prompts = [draw.randint(2, min(most, 200)) for _ in range(draw.randint(1, 3))]
        counts = [1] * draw.randint(0, 4) + prompts
        yield counts, [draw.randint(count, longest) for count in counts]


def light(counts, lengths):
    """The part of a batch that attention looks at before it launches."""
    meta = torch.empty(sum(counts), dtype=torch.int32, device="meta")
    num_decodes = next((i for i, count in enumerate(counts) if count > 1), len(counts))
    return SimpleNamespace(
        positions=meta, slots=meta.long(), block_tables=meta[:, None].expand(-1, 9), lengths=meta, query_starts=meta,
        num_decodes=num_decodes, query_len=1, query_lens=counts, kv_lens=lengths, sampled=None, reach=None, scratch={},
    )  # fmt: skip


@pytest.mark.parametrize("dtype, dim", [(torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 64)])
@pytest.mark.parametrize("longest, budget, window", [(5000, 2048, 0), (5000, 2048, 700), (300, 8192, 0), (20, 10, 0)])
def test_no_step_needs_a_kernel_that_the_start_has_not_compiled(monkeypatch, dtype, dim, longest, budget, window):
    """Each is seconds of compilation, which the first prompts of some lengths waited for."""
    one = Attention(monkeypatch, longest, dtype, dim, window)
    for batch in profile_run.small_steps(one, budget, BLOCK, Upload(CPU)):
        one.forward([batch])
    compiled = set(one.asked)
    for counts, lengths in served(longest, budget):
        one.forward([light(counts, lengths)])
        assert one.asked == compiled, (counts, lengths, one.asked - compiled)


@pytest.mark.parametrize(
    "caps", [DeviceCaps(132, "sm_90a", True, True, True), DeviceCaps(148, "sm_100", True, True, False)]
)
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_gemms_of_few_rows_are_compiled_at_the_start(caps, outputs, inputs):
    """However few sequences may run: graphs of more do not compile them then."""
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
    for gate in ("", "silu"):
        compiled = set(linear.variants((1, *profile_run.PROMPTS[:-1]), weight, gate, False, caps))
        assert set(linear.variants(range(1, pipelined_gemm.MAX_ROWS + 1), weight, gate, False, caps)) == compiled


@pytest.mark.parametrize("first, last", [(True, True), (True, False), (False, True)])
def test_the_start_runs_all_small_steps(first, last, monkeypatch):
    """On every stage; the last one also what samples."""
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    ran, one = [], indexed(100, 32)
    one.received_size, one.vocab_size = 8, 11
    one.logits = lambda rows: torch.zeros(len(rows), 11)
    one.vision = Mock()
    one.vision.pieces = lambda pixels: (ran.append(("tower", *pixels.shape)) for _ in range(3))
    one.vision.rules.largest.return_value = 28, 56

    def forward(batches, hidden):
        (batch,) = batches
        ran.append((batch.query_lens, batch.kv_lens, batch.sampled is not None))
        assert hidden is None or len(hidden) == sum(batch.query_lens)
        return torch.zeros(sum(batch.query_lens), 8)

    one.forward = forward
    monkeypatch.setattr(profile_run, "tp_argmax", lambda *_: ran.append("argmax"))
    mesh = SimpleNamespace(first=first, last=last, tensor=SimpleNamespace(rank=0, all_gather=lambda x: x[None]))
    sampler = SimpleNamespace(
        device=CPU, enter=lambda _: None, leave=lambda _: None,
        sample=lambda logits, rows, *_: ran.append("sample") or rows_of.append(rows.tolist()),
    )  # fmt: skip
    rows_of, source = [], Source()
    profile_run.profile_run(one, mesh, sampler, 64, 4, BLOCK, None, 6, (1, 3), source if last else None)
    assert rows_of == last * [[0, 1, 2, 3], [0, 0, 1, 1, 2, 3]] and source.ran == last * [64, 4]
    steps = profile_run.small_steps(one, 64, BLOCK, Upload(CPU), None, (1, 3))
    small = [(b.query_lens, b.kv_lens, False) for b in steps] + [([64], [100], False), ([32, 32], [32, 32], False)]
    assert ([3], [3], False) in small and ([3, 4], [4, 4], False) in small
    assert len(small) > 6 and all(step in ran for step in small)
    assert ran[0] == ("tower", 28, 56, 3)
    assert ran.count(ran[0]) == 3
    assert ran.count("argmax") == last
    assert ran.count("sample") == last * len(profile_run.SAMPLED)


def test_the_profile_samples_with_all_that_a_request_may_ask_for():
    sampler, x = Sampler(4, 40, CPU), torch.randn(4, 40)
    seen = []
    sampled = sampler.sample
    sampler.sample = lambda *arguments: seen.append(sampled(*arguments)) or seen[-1]
    for sampling in profile_run.SAMPLED:
        profile_run.sample(sampler, x.clone(), sampling, 4)
    assert [one.logprobs is not None for one in seen] == [True, False]
    every = profile_run.SAMPLED[0]
    assert every.top_p < 1 and every.repetition_penalty != 1 and every.presence_penalty and every.logprobs == 20


def test_memory_for_contexts_longer_than_the_largest_step():
    def context(specs, tokens, kept=torch.bfloat16, dtype=torch.bfloat16):
        return profile_run.context_bytes(specs, 1000, tokens, dtype, kept)

    assert context([PagedLatent(576)] * 2, 200) == 800 * 576 * 4
    assert context([PagedLatent(576)] * 2, 1000) == context([], 200) == 0
    one = indexed(1000, 500)
    assert context(one.cache_specs(), 200, dtype=one.dtype) == 300 * 24 * 4, "others are chosen from"
    paged = model(1000)
    assert context(paged.cache_specs(), 200, dtype=paged.dtype) == 0, "read where they are"
    assert context(paged.cache_specs(), 200, E4M3, paged.dtype) == 800 * 2 * 16 * 2
