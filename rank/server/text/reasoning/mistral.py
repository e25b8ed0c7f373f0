"""[THINK]…[/THINK]: Mistral's Magistral and the models after it."""

from . import ReasoningFormat

OPEN, CLOSE = "[THINK]", "[/THINK]"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: CLOSE in template or {OPEN, CLOSE} <= {*added},
)
