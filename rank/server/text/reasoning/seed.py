"""<seed:think>…</seed:think>: ByteDance's Seed-OSS."""

from . import ReasoningFormat

OPEN, CLOSE = "<seed:think>", "</seed:think>"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: CLOSE in template or {OPEN, CLOSE} <= {*added},
)
