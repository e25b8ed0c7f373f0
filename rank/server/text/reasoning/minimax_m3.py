"""<mm:think>…</mm:think>: MiniMax M3."""

from . import ReasoningFormat

OPEN, CLOSE = "<mm:think>", "</mm:think>"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: CLOSE in template or {OPEN, CLOSE} <= {*added},
)
