"""The roofline against steps and prompts that were measured on H200: Phalanx's own, and vLLM's.

Phalanx: benchmarks/offline.py, 2026-11-22 (benchmarks/results/h200-2026-11-22.jsonl). vLLM: 0.25.1, 2026-11-20.
"""

from dataclasses import replace

import msgspec
import pytest
from phalanx.kernels.moe import moe
from phalanx.kernels.quantized import e4m3_wgmma
from phalanx.kernels.quantized.super_blocks import SuperBlocks, q6_k
from phalanx.launcher.commands.fit import devices, memory, offload, plan, speed
from phalanx.launcher.commands.fit.devices import DEVICES, CpuSpeed
from phalanx.launcher.commands.fit.memory import Layout, Workload
from phalanx.rank.model.experts import host, host_buffers, small_batch, streamer
from phalanx.rank.model.experts import offload as serving

from .configs import CONFIGS, WITH_WINDOWS, read, write

H200 = DEVICES["H200"]
# (model, GPUs): ms per step by batch; prompts of 128 and 256 new tokens: 272 are read on average
OURS = {1: {1: 4.17, 16: 4.40, 64: 5.32, 256: 10.11}, 2: {1: 2.83, 16: 2.88, 64: 3.55, 256: 6.16}}
# In bf16, h200-experts-2026-11-23.jsonl
EXPERTS_PREFILL = {(1, 8191): 57.8e3, (16, 1024): 76.1e3}
OUR_PREFILL = {8191: 38.2e3, 1024: 43.9e3}
DECODE = {
    ("Llama-3.1-8B", 1): {1: 4.90, 16: 5.17, 64: 6.11, 256: 11.32},
    ("Llama-3.1-8B", 2): {1: 3.47, 16: 3.68, 64: 4.14, 256: 7.26},
    ("Llama-3.1-70B", 4): {1: 12.23, 16: 12.79, 64: 14.73, 256: 25.10},
    ("Qwen3-30B-A3B", 1): {1: 4.10, 64: 17.95, 256: 21.78},
}
PREFILL = {("Llama-3.1-8B", 1): {8191: 38.6e3, 1024: 43.5e3}, ("Llama-3.1-70B", 4): {8191: 14.4e3, 1024: 15.0e3}}
# Quantised (docs/measurements, 2026-11-25 and 26): ms per step by batch, and prompts by (sequences, tokens).
QUANTISED = {
    ("Llama-3.1-8B", "q4km", "H200"): {1: 1.99, 16: 2.93, 64: 4.15, 256: 9.61},
    ("Llama-3.1-8B", "q8_0", "H200"): {1: 2.71, 16: 2.72, 64: 4.04, 256: 9.55},
    ("Llama-3.1-8B", "fp8", "H200"): {1: 2.28, 16: 2.73, 64: 3.61, 256: 7.16},
    ("Llama-3.1-8B", "fp8", "H100"): {1: 3.00, 16: 3.47, 64: 4.73, 256: 8.68},
    ("Llama-3.1-70B", "q4km", "H100"): {1: 22.59, 16: 26.20, 64: 29.59},
    ("Qwen3-30B-A3B", "q4km", "H100"): {1: 2.69, 16: 7.19, 64: 10.58},
    ("Qwen3-30B-A3B", "q4km", "H200"): {1: 2.11, 16: 5.92, 64: 8.59},
    ("Qwen3-30B-A3B in FP8", "none", "H200"): {1: 2.30, 16: 6.77, 64: 10.07, 256: 13.13},
}
FP8_PREFILL = {
    ("Llama-3.1-8B", "fp8"): {(1, 8191): 58.5e3, (16, 1024): 72.5e3},
    ("Qwen3-30B-A3B in FP8", "none"): {(1, 8191): 70.4e3, (16, 1024): 101e3},
}
# A layer's experts of Qwen3-30B-A3B in FP8 on an H200 (h200-fp8-experts-2026-11-26-late.txt): us by tokens
FP8_EXPERTS = {16: 110.7, 64: 166.4, 128: 172.4, 256: 179.4, 512: 198.6, 2048: 312.1, 8192: 941.7}
# --isq q4km, (model, device, experts of a layer in host memory alone, of 128, batch): ms per step (benchmarks/results:
# h200-offload-2026-11-27.txt (CJ, CK); of older code h100-offload-2026-11-25.jsonl and h200-qwen3-235b-2026-11-26.txt,
# where 32 were out). Random weights repeat themselves, so more were resident of what was chosen than even routing
# finds: of each run a number stands here with which it finds as many. 7.67 of 8 are 123 of 128, 76.3 of 82.3 are 119,
# 34.4 of 82.1 missing are 54.
OFFLOADED = {
    ("Qwen3-30B-A3B", "H200", 5, 1): 2.905,
    ("Qwen3-30B-A3B", "H200", 54, 16): 55.86,
    ("Qwen3-30B-A3B", "H200", 128, 1): 14.13,
    ("Qwen3-30B-A3B", "H200", 128, 16): 115.1,
    ("Qwen3-30B-A3B", "H100", 41, 16): 57.5,
    ("Qwen3-235B-A22B", "H200", 2, 1): 10.24,
    ("Qwen3-235B-A22B", "H200", 9, 16): 92.23,
}
# Speeds of a host whose CPU read 92 to 117 GB/s at the start, where it read 76 to 89 of the others (AZ). What the CPU
# serves alone since is not here.
FASTER_HOST, OFFLOADED_THERE = 105, {(128, 1): 12.38, (42, 16): 39.34, (128, 16): 109.1}
# Half of 128 experts in host memory, drawn by Zipf's law with an exponent of 0.8, as fit takes routing to be unless it
# is told: by batch, ms per step, and experts of a layer that are visited, and resident of them, as on BD. One sequence
# is of CJ and, on a faster host, of CH; 16 are of BD with older code.
ZIPF, DRAWN = 0.8, {1: (5.654, 8.01, 6.19), 16: (50.56, 65.66, 43.28)}
DRAWN_ON_CH = 4.836
# A prompt of 4096 tokens, (device, experts): tokens/s.
PROMPTS = {("H100", 0): 32186, ("H200", 0): 45251, ("H200", 64): 22607, ("H200", 128): 11149}


@pytest.fixture
def predict(tmp_path, monkeypatch):
    """Bytes of Q6_K with codes in 8 bits, as all of these steps were measured: they have 6 since."""
    wide = SuperBlocks(q6_k.type._replace(form=q6_k.type.form._replace(bits=8)))
    monkeypatch.setattr(q6_k, "kept_bits", wide.kept_bits)

    def one(name, layout, batch, length, device=H200, per_node=8, dtype="bf16", budget=8192, isq="none", zipf=0.0):
        shape = read(write(tmp_path / name, CONFIGS[name]), dtype, isq=isq)
        asked = Workload(8192, batch, length, dtype, zipf=zipf)
        return speed.predict(shape, layout, device, asked, batch, budget, per_node, 50e9)

    return one


def test_our_own(predict):
    for gpus, by_batch in OURS.items():
        for batch, measured in by_batch.items():
            found = predict("Llama-3.1-8B", Layout(gpus), batch, 272).decode_ms
            assert found == pytest.approx(measured, rel=0.25)
    for prompt, measured in OUR_PREFILL.items():
        assert predict("Llama-3.1-8B", Layout(1), 16, prompt).prefill_per_s == pytest.approx(measured, rel=0.25)
    for (batch, prompt), measured in EXPERTS_PREFILL.items():
        found = predict("Qwen3-30B-A3B", Layout(1), batch, prompt).prefill_per_s
        assert found == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("name", "gpus"), DECODE, ids=str)
def test_decode(predict, name, gpus):
    for batch, measured in DECODE[name, gpus].items():
        found = predict(name, Layout(gpus), batch, 272)
        assert found.decode_ms == pytest.approx(measured, rel=0.25)
        assert found.tokens_per_s == pytest.approx(batch / found.decode_ms * 1e3)


@pytest.mark.parametrize(("name", "gpus"), PREFILL, ids=str)
def test_prefill(predict, name, gpus):
    for prompt, measured in PREFILL[name, gpus].items():
        assert predict(name, Layout(gpus), 16, prompt).prefill_per_s == pytest.approx(measured, rel=0.25)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "isq", "device"), QUANTISED, ids=str)
def test_quantised(predict, name, isq, device):
    for batch, measured in QUANTISED[name, isq, device].items():
        found = predict(name, Layout(1), batch, 272, DEVICES[device], isq=isq)
        assert found.decode_ms == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("name", "isq"), FP8_PREFILL, ids=str)
def test_prompts_of_fp8(predict, name, isq):
    for (batch, prompt), measured in FP8_PREFILL[name, isq].items():
        found = predict(name, Layout(1), batch, prompt, isq=isq)
        assert found.prefill_per_s == pytest.approx(measured, rel=0.25)


def expert_seconds(tmp_path, device, tokens, config):
    shape = read(write(tmp_path / "model", config))
    links = speed.links(Layout(1), device, 1, 50e9)
    clock = speed.StepModel(shape, Layout(1), device, links, Workload(8192, 1, 1))
    gemms = [clock._gemm(one, tokens) for one in shape.kinds(1, 1)[0].weights if one.expert]
    return sum(gemms) + 4 * device.small  # sorting, what makes e4m3 of x twice, the sum


@pytest.mark.parametrize("tokens", FP8_EXPERTS)
def test_experts_of_fp8(tmp_path, tokens):
    found = expert_seconds(tmp_path, H200, tokens, CONFIGS["Qwen3-30B-A3B in FP8"])
    assert found * 1e6 == pytest.approx(FP8_EXPERTS[tokens], rel=0.25)


def test_where_8_bits_are_multiplied(tmp_path):
    """On Hopper, and where 128 inputs share a scale: else FP8 experts of many pairs are dequantised first."""
    config = CONFIGS["Qwen3-30B-A3B in FP8"]
    narrow = config | {"quantization_config": config["quantization_config"] | {"weight_block_size": [64, 64]}}
    wide = expert_seconds(tmp_path, H200, 8192, config)
    assert expert_seconds(tmp_path, H200, 8192, narrow) > 2 * wide
    assert expert_seconds(tmp_path, msgspec.structs.replace(H200, fp8=1.0), 8192, config) > 2 * wide
    cut = read(write(tmp_path / "model", config)).ranks[8].kinds[0].weights  # down has 96 inputs, in scales of 32
    assert [one.fp8 for one in cut if one.expert] == [False, False] and any(one.fp8 for one in cut)
    assert [name for name, one in DEVICES.items() if one.fp8 > 1] == ["H200", "H100", "GH200", "H20"]


@pytest.mark.parametrize(
    ("name", "device", "experts", "batch"),
    [pytest.param(*one, marks=[pytest.mark.long] if "235B" in one[0] else []) for one in OFFLOADED],
)
def test_experts_in_host_memory(predict, name, device, experts, batch):
    fast = msgspec.structs.replace(DEVICES[device], host=devices.host(None, 1))
    found = predict(name, Layout(1, offload=experts), batch, 192, fast, isq="q4km")
    assert found.decode_ms == pytest.approx(OFFLOADED[name, device, experts, batch], rel=0.25)


@pytest.mark.parametrize(("experts", "batch"), OFFLOADED_THERE, ids=str)
def test_experts_in_memory_of_a_host_that_was_measured(predict, experts, batch):
    speeds = CpuSpeed("there", 16, 16 * 112.0, FASTER_HOST)
    fast = msgspec.structs.replace(H200, host=devices.host(speeds, 1))
    found = predict("Qwen3-30B-A3B", Layout(1, offload=experts), batch, 192, fast, isq="q4km")
    assert found.decode_ms == pytest.approx(OFFLOADED_THERE[experts, batch], rel=0.25)


@pytest.mark.parametrize("batch", DRAWN)
def test_routing_by_zipf(predict, batch):
    measured, visited, resident = DRAWN[batch]
    chances = offload.chances(128, 8, batch, ZIPF)
    assert sum(chances) == pytest.approx(visited, rel=0.01)
    share = offload.Missing(128, 64, 0).share(chances)
    assert 1 - share == pytest.approx(resident / visited, rel=0.02)
    # Fixed experts do not follow the routing: with all in their places as many are missing as of even routing.
    assert share < offload.Missing(128, 64, 32).share(chances) < offload.Missing(128, 64, 64).share(chances)
    assert offload.Missing(128, 64, 64).share(chances) == pytest.approx(0.5)
    assert offload.Missing(128, 40, 23).share(offload.chances(128, 8, batch, 0.0)) == pytest.approx(40 / 128)
    found = predict("Qwen3-30B-A3B", Layout(1, offload=64), batch, 192, isq="q4km", zipf=ZIPF)
    assert found.decode_ms == pytest.approx(measured, rel=0.25)
    assert batch > 1 or found.decode_ms == pytest.approx(DRAWN_ON_CH, rel=0.25)


@pytest.mark.parametrize(("device", "experts"), PROMPTS, ids=str)
def test_prompts_of_quantised_experts(predict, device, experts):
    found = predict("Qwen3-30B-A3B", Layout(1, offload=experts), 1, 4096, DEVICES[device], isq="q4km")
    assert found.prefill_per_s == pytest.approx(PROMPTS[device, experts], rel=0.25)


@pytest.mark.long
def test_prompts_of_a_model_that_host_and_gpu_hold_together(predict):
    """32 of 128 experts are copied for 2048 tokens: 2659 tokens/s were measured in the run of OFFLOADED."""
    found = predict("Qwen3-235B-A22B", Layout(1, offload=32, fixed=22), 1, 2048, isq="q4km")
    assert found.prefill_per_s == pytest.approx(2659, rel=0.25)


def test_a_long_prompt_copies_all_experts_for_each_step(predict):
    """19.5 GB over PCIe take 0.36 s, for 8192 tokens as for 2048."""
    once, few, twice = (
        predict("Qwen3-30B-A3B", Layout(1, offload=128), 1, prompt, isq="q4km").prefill_per_s
        for prompt in (8192, 2048, 10000)
    )
    assert once == pytest.approx(4 * few, rel=0.2) and twice == pytest.approx(once * 5000 / 8192, rel=0.2)


def test_the_ways_of_serving_experts_in_host_memory(predict):
    speeds = devices.Host(bandwidth=100e9, cpu=60e9, flops=1e12, source="")
    # of the fewest pairs the CPU reads all, where it is fast enough and something is resident
    slow = msgspec.structs.replace(speeds, cpu=20e9)
    assert offload.cpu_alone(speeds, 16, 0.5) and not offload.cpu_alone(speeds, 17, 0.5)
    assert not offload.cpu_alone(speeds, 16, 0.0) and not offload.cpu_alone(slow, 16, 0.5)
    busy = 1e-3 - offload.MAKING_OVER
    assert offload.beside(speeds, 1, True, 1e-3, 160e6, 0) == pytest.approx(160e6 / 60e9)
    assert offload.beside(slow, 1, False, busy, 160e6, 0) == pytest.approx(1e-3 + 140e6 / (20e9 + 0.83 * 54e9))
    # of few tokens the CPU reads 60 MB in the 1 ms for which the GPU is busy, and both the other 100 MB in 1 ms
    assert offload.beside(speeds, 16, False, busy, 160e6, 0) == pytest.approx(2e-3)
    assert offload.beside(speeds, 16, False, busy, 50e6, 0) == pytest.approx(1e-3)
    # of more, copies run from the beginning
    assert offload.beside(speeds, 17, False, 1e-3, 160e6, 0) == pytest.approx(1.6e-3)
    # the CPU computes 20 GFLOP for 160 MB in 20 ms, 8 GB/s: copies have most
    assert offload.beside(speeds, 64, False, 0, 160e6, 20e9) == pytest.approx(160e6 / (8e9 + 0.83 * 54e9))
    # one more expert out is one more that is read, by the CPU; where all are out, copies take a part
    times = [predict("Qwen3-30B-A3B", Layout(1, offload=n), 1, 1).decode_ms for n in (1, 32, 64, 128)]
    assert times == sorted(times) and times[2] - times[1] == pytest.approx((times[1] - times[0]) * 32 / 31, rel=0.1)


def test_sizes_are_those_of_serving():
    found = offload.FEW, offload.CPU_ROUTED, offload.DEARER, offload.LOOKED, offload.ALL
    assert found == (host_buffers.KEPT, small_batch.CPU_ROUTED, small_batch.DEARER, host.LOOKED, host.ALL)
    found = speed.PAIRS, speed.FP8_PAIRS, speed.FP8_ROWS
    fp8 = next(one for one in moe.CANDIDATES if one.borders == (24, 64, 256))
    assert found == (moe.PLAIN_ROUTED, fp8.above, e4m3_wgmma.LEAST_ROWS)
    assert memory.BUFFERS == streamer.BUFFERS * streamer.BUFFER and plan.SPARED == serving.SPARED
    assert plan.HOST_SPARED == serving.HOST_SPARED


def test_the_floor_is_reading_the_weights(predict):
    """8B at batch 1: 7.5e9 parameters x 2 bytes / 4.51e12 bytes/s = 3.33 ms, and kernels' own time on top."""
    floor = 7_504_924_672 * 2 / (4.8e12 * 0.94) * 1e3
    assert floor == pytest.approx(3.33, abs=0.01)
    # 32 layers of 4 GEMMs x 3.5 us and 5 small kernels x 2.5 us: 0.85 ms
    found = predict("Llama-3.1-8B", Layout(1), 1, 1).decode_ms
    assert found == pytest.approx(floor + 32 * (4 * 3.5e-3 + 5 * 2.5e-3), rel=0.02)


def test_a_tower_takes_time_of_images_alone(tmp_path):
    """Its linears multiply an image's patches, and not the tokens that are sampled."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 2, "model_type": "gemma3_text"}
    seen = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "image_size": 896}
    seen |= {"patch_size": 14, "num_attention_heads": 16, "num_hidden_layers": 27}
    both = {"model_type": "gemma3", "image_token_index": 9, "text_config": text, "vision_config": seen}
    shapes = [read(write(tmp_path / str(i), config)) for i, config in enumerate((both, text))]
    asked = Workload(8192, 64, 4096)
    of = [(shapes[0], asked), (shapes[1], asked), (shapes[0], replace(asked, images=2))]
    found = [speed.predict(shape, Layout(1), H200, one, 64, 8192, 8, 50e9) for shape, one in of]
    assert replace(found[0], image_ms=0.0) == found[1] and shapes[0].active == shapes[1].active
    patches = (896 // 14) ** 2
    least = 2 * 27 * patches * (4 * 1152**2 + 2 * 1152 * 4304 + 2 * 1152 * patches) / H200.flops * 1e3
    assert least < found[0].image_ms < 1.2 * least
    more = 1e3 / found[2].prefill_per_s - 1e3 / found[0].prefill_per_s  # ms of a token
    assert more * 4096 == pytest.approx(2 * found[0].image_ms)
    assert shapes[0].parameters > 1.5 * shapes[1].parameters - 2 * 262208 * 2560


def test_only_a_head_samples(tmp_path):
    """A linear before the layers is multiplied with all tokens."""
    shape = read(write(tmp_path, CONFIGS["Llama-3.1-8B"]))
    (stage,) = shape.stage_shapes(1, 1, 1)
    (head,) = (one for one in stage.ends if one.matrix)
    other = msgspec.structs.replace(head, name="model.projection")
    asked = Workload(8192, 64, 4096)
    clock = speed.StepModel(shape, Layout(1), H200, speed.links(Layout(1), H200, 8, 50e9), asked)
    with_both = msgspec.structs.replace(stage, ends=(*stage.ends, other))
    more = clock.step(with_both, 2048, 0, 1) - clock.step(stage, 2048, 0, 1)
    assert more == pytest.approx(2 * head.elements * 2048 / H200.flops, rel=0.2)


def test_windows_bound_what_attention_reads(tmp_path):
    """Half of gpt-oss's layers read 128 tokens of a sequence, when they decode and when a prompt is computed."""
    shape = read(write(tmp_path, WITH_WINDOWS["gpt-oss-20b"]))
    (stage,) = shape.stage_shapes(1, 1, 1)
    clock = speed.StepModel(shape, Layout(1), H200, speed.links(Layout(1), H200, 8, 50e9), Workload(8192, 64, 4096))
    more = clock.step(stage, 64, 64 * 8192, 64) - clock.step(stage, 64, 64 * 128, 64)
    assert more == pytest.approx(12 * 64 * (8192 - 128) * 2 * 8 * 64 * 2 / (H200.bandwidth * speed.CACHED))
    narrow = [one for one in stage.layers if one.window]
    windowed, whole = (msgspec.structs.replace(stage, layers=(layer,)) for layer in (narrow[0], stage.layers[1]))
    assert (narrow[0].window, stage.layers[1].window, len(narrow)) == (128, 0, 12)
    assert clock.scores(windowed, 99, 128) == clock.scores(whole, 99, 128)
    assert clock.scores(windowed, 99, 1024) == pytest.approx(clock.scores(whole, 99, 2 * (128 - 8)))


def test_pipelines(predict):
    """A lone sequence walks through all stages; with one for each, the slowest stage sets the pace."""
    one = predict("Llama-3.1-8B", Layout(1), 1, 256)
    walked = predict("Llama-3.1-8B", Layout(1, 4), 1, 256)
    assert one.decode_ms < walked.decode_ms < 1.1 * one.decode_ms
    many = predict("Llama-3.1-8B", Layout(1, 4), 256, 256)
    assert many.tokens_per_s > 1.5 * predict("Llama-3.1-8B", Layout(1), 256, 256).tokens_per_s
    assert many.prefill_per_s > 3 * one.prefill_per_s


def test_replicas_and_nodes(predict):
    single, double = predict("Llama-3.1-8B", Layout(1), 64, 256), predict("Llama-3.1-8B", Layout(1, 1, 2), 128, 256)
    assert double.tokens_per_s == pytest.approx(2 * single.tokens_per_s)
    inside = predict("Llama-3.1-70B", Layout(8), 16, 256)
    over_nodes = predict("Llama-3.1-70B", Layout(8), 16, 256, per_node=4)
    assert over_nodes.decode_ms > inside.decode_ms + 160 * 2 * 20e-3  # 160 all-reduces, two hops each


def test_experts(predict):
    """One token reads 8 of 128 experts, 256 tokens nearly all of them."""
    alone = predict("Qwen3-30B-A3B", Layout(1), 1, 1).decode_ms
    crowd = predict("Qwen3-30B-A3B", Layout(1), 256, 1).decode_ms
    assert alone * 1e-3 > 3_041_867_776 * 2 / H200.bandwidth
    assert crowd * 1e-3 > (30_532_122_624 - 311_164_928) * 2 / H200.bandwidth
    # The busiest of eight ranks has more than an eighth of the experts that one token visits, but not of a crowd's.
    cut, shared = ([predict("Qwen3-30B-A3B", Layout(8, ep=ep), n, 1).decode_ms for n in (1, 512)] for ep in (1, 8))
    assert shared[0] > 1.05 * cut[0] and shared[1] == pytest.approx(cut[1], rel=0.02)
    # in the host's memory they are read at its speed or over PCIe
    assert predict("Qwen3-30B-A3B", Layout(1, offload=128), 256, 1).decode_ms > 10 * crowd


def test_cpus(predict):
    """Two cores at 21 GB/s read 8B in f32, 30 GB, in 1.43 s; two ranks share them."""
    speeds = CpuSpeed("here", 2, 224.0, 21.0)
    whole = devices.cpu(speeds, 1, 64e9, "")
    assert predict("Llama-3.1-8B", Layout(1), 1, 1, whole, 1, "f32", 512).decode_ms == pytest.approx(1430, rel=0.02)
    half = devices.cpu(speeds, 2, 32e9, "")
    assert predict("Llama-3.1-8B", Layout(2), 1, 1, half, 2, "f32", 512).decode_ms == pytest.approx(1430, rel=0.03)


def test_saved_speeds(tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert devices.saved_speed(environ) is None
    speeds = CpuSpeed("here", 8, 900.0, 80.0, 12.0, "2026-11-21")
    path = devices.save_speed(speeds, environ)
    assert path == tmp_path / "phalanx" / "cpu-speed.json" and list(path.parent.iterdir()) == [path]
    assert devices.saved_speed(environ) == speeds
    path.write_text("{")
    assert devices.saved_speed(environ) is None
    assert devices.speed_file({"HOME": "/home/me"}) == devices.Path("/home/me/.cache/phalanx/cpu-speed.json")


def test_typical_cores():
    assert devices.typical(2) == devices.TYPICAL
    assert (devices.typical(64).gflops, devices.typical(64).gbps) == (64 * 112.0, 100.0)
