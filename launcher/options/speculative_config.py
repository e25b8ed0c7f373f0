"""vLLM's --speculative-config: a JSON object that says what several options say here."""

from __future__ import annotations

from typing import Any

import msgspec

NGRAM = dict.fromkeys(("ngram", "ngram_gpu", "suffix"), "ngram")
METHODS = NGRAM | {"eagle3": "eagle3", "draft_model": "draft", "mtp": "mtp"}


class SpeculativeConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The keys that can be understood."""

    num_speculative_tokens: int | None = None
    method: str | None = None
    model: str | None = None
    draft_tensor_parallel_size: int | None = None
    # Not read: how many tokens have to be equal is fixed, drafts are computed for sequences as long as the target's and
    # with graphs, and how many are verified is chosen for each step, whatever the batch.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    max_model_len: int | None = None
    disable_by_batch_size: int | None = None
    disable_padded_drafter_batch: bool | None = None
    enforce_eager: bool | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None


def options(text: str) -> dict[str, Any]:
    """The values of options by their names. Raises ValueError where the text means none."""
    try:
        found = msgspec.json.decode(text, type=SpeculativeConfig)
    except msgspec.DecodeError as error:
        keys = ", ".join(SpeculativeConfig.__struct_fields__)
        raise ValueError(f"{error}; a JSON object with keys of {keys} is needed") from None
    method = found.method or ("draft_model" if found.model else "ngram")
    kind = "mtp" if method.endswith("_mtp") else METHODS.get(method)
    if kind is None:
        raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)}")
    if kind in ("draft", "eagle3") and not found.model:
        raise ValueError(f"the method {method} needs a model")
    values: dict[str, Any] = {"speculate": kind, "draft_model": found.model if kind in ("draft", "eagle3") else ""}
    if found.draft_tensor_parallel_size is not None and kind == "draft":
        values["draft_tensor_parallel_size"] = found.draft_tensor_parallel_size
    if found.num_speculative_tokens is not None:
        values["num_speculative_tokens"] = found.num_speculative_tokens
    elif kind != "mtp" and method != "suffix":
        raise ValueError(f"the method {method} needs num_speculative_tokens")
    return values
