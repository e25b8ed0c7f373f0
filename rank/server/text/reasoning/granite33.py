"""<think>…</think><response>…</response>: Granite 3.3, which marks its answer too."""

from . import ReasoningFormat

OPEN, CLOSE = "<think>", "</think>"
ANSWER, ANSWER_END = "<response>", "</response>"

FORMAT = ReasoningFormat(
    (OPEN,),
    (CLOSE,),
    matches=lambda template, added: OPEN in template and ANSWER in template,
    dropped=(ANSWER, ANSWER_END),
    around=(ANSWER, ANSWER_END),
)
