"""OpenAI's harmony: an answer is several messages, each in a channel. Analysis holds the thoughts; final and commentary
are for the user; calls are read by the tool-call format of the same name.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

https://cookbook.openai.com/articles/openai-harmony
"""

from . import ReasoningFormat

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>assistant"
ENDS = ("<|end|>", "<|return|>", "<|call|>")

FORMAT = ReasoningFormat(
    (f"{CHANNEL}analysis{MESSAGE}",),
    ENDS,
    matches=lambda template, added: f"{CHANNEL}analysis" in template,
    dropped=(START, f"{CHANNEL}final{MESSAGE}", f"{CHANNEL}commentary{MESSAGE}", *ENDS),
    joint=START,
    around=(f"{CHANNEL}final{MESSAGE}", ""),
)
