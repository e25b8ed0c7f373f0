"""The types that llama.cpp's quantiser gives each tensor, by what its files of known models have."""

import pytest
from phalanx.rank.gguf.mixes import MIXES, Sizes, fitting, type_of

LLAMA_8B = Sizes(32, queries=4)
# Layers of 32 with more bits: of Llama-3.1-8B's published Q4_K_M file.
MORE = [*range(4), 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)]


def layers_with(mix, part, type, sizes=LLAMA_8B):
    return [layer for layer in range(sizes.layers) if type_of(mix, part, layer, sizes) == type]


@pytest.mark.parametrize("part", ["attn_v", "ffn_down", "ffn_down_exps"])
@pytest.mark.parametrize("mix", ["q4km", "q5km"])
def test_layers_with_more_bits(mix, part):
    assert layers_with(mix, part, "Q6_K") == MORE
    assert layers_with(mix, part, MIXES[mix]) == [one for one in range(32) if one not in MORE]


@pytest.mark.parametrize("mix, part, type, layers", [
    ("q3km", "attn_v", "Q5_K", [0, 1]), ("q3km", "ffn_down", "Q5_K", [0, 1]),
    ("q3km", "attn_output", "Q4_K", range(32)), ("q3km", "ffn_up", "Q3_K", range(32)),
    ("q4km", "attn_q", "Q4_K", range(32)), ("q4km", "attn_qkv", "Q6_K", MORE),
    ("q4km", "output", "Q6_K", range(32)), ("Q4_0", "output", "Q6_K", range(32)), ("Q8_0", "output", "Q8_0", range(32)),
    ("Q4_0", "attn_v", "Q4_0", range(32)), ("q4km", "token_embd", "Q4_K", range(32)),
])  # fmt: skip
def test_types(mix, part, type, layers):
    assert layers_with(mix, part, type) == list(layers)


def test_experts_of_mixtral_and_values_of_70b():
    mixtral, large = Sizes(32, 8, 4), Sizes(80, queries=8)
    assert {type_of("q4km", part, 5, mixtral) for part in ("attn_k", "attn_v")} == {"Q8_0"}
    assert type_of("q4km", "attn_output", 5, mixtral) == "Q5_K"
    assert set(layers_with("q4km", "attn_v", "Q5_K", large)) | set(layers_with("q4km", "attn_v", "Q6_K", large)) == set(
        range(80)
    )
    assert layers_with("q4km", "ffn_up", "Q4_K", large) == list(range(80))


@pytest.mark.parametrize("inputs, types", [
    (512, ["Q3_K", "Q4_K", "Q6_K", "Q4_0"]), (480, ["Q4_0", "Q5_0", "Q8_0", "Q4_0"]), (100, ["F16"] * 4),
])  # fmt: skip
def test_rows_that_are_no_whole_super_blocks(inputs, types):
    assert [fitting(one, inputs) for one in ("Q3_K", "Q4_K", "Q6_K", "Q4_0")] == types
