"""<thought>…</thought>."""

from . import ReasoningFormat

OPEN, CLOSE = "<thought>", "</thought>"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: "</think>" not in template and (CLOSE in template or {OPEN, CLOSE} <= {*added}),
)
