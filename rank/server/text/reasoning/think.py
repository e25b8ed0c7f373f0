"""<think>…</think>: DeepSeek R1, Qwen3, GLM 4.5, MiniMax M2 and most others."""

from . import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: (
        "[THINK]" not in template
        and "<response>" not in template
        and (CLOSE in template or ({OPEN, CLOSE} <= {*added} and "[THINK]" not in added))
    ),
)
