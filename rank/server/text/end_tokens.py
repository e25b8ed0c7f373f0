"""Tokens that end an answer, by model family.

Files name one or two of them: the end of a turn or of a text, seldom both, and a completion of code goes on behind the
end of its text with another one. So all that a family has count, whatever its files name.
"""

from __future__ import annotations

from collections.abc import Collection

# End an answer in every vocabulary that has them as added tokens. </s> is not among them: in some it is HTML.
ENDS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>",
    "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|EOT|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "[e~[",
    "<|END_OF_TURN_TOKEN|>", "<|assistant_end|>", "[|endofturn|]", "<seed:eos>",
)  # fmt: skip
# End an answer where the vocabulary has all of the first ones.
ENDS_WITH = (
    (("<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),  # harmony
    (("<|flush|>", "<|calls|>"), ("<|flush|>", "<|calls|>")),  # Solar
    (("<turn|>", "<|tool_response>"), ("<|tool_response>",)),  # Gemma 4: what follows is the tool's
    (("[gMASK]", "<sop>", "<|user|>", "<|observation|>"), ("<|user|>", "<|observation|>")),  # GLM
)  # fmt: skip
INNER_END = "<|end|>"  # ends no more than a part of the answer in harmony and Solar's format


def family_ends(added: Collection[str]) -> list[str]:
    """The added tokens that end an answer."""
    found = [end for end in ENDS if end in added]
    found += [end for needed, ends in ENDS_WITH if all(one in added for one in needed) for end in ends]
    return [end for end in found if end not in inner_ends(added)]


def inner_ends(added: Collection[str]) -> tuple[str, ...]:
    """Tokens that end a part of an answer only, although files may list them as ends."""
    return (INNER_END,) if any(all(one in added for one in needed) for needed, _ in ENDS_WITH[:2]) else ()
