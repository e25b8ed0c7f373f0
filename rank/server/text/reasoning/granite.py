"""Here is my thought process: … Here is my response: …: Granite 3.2, text instead of tokens."""

from . import ReasoningFormat

THOUGHTS, ANSWER = "my thought process:", "my response:"

FORMAT = ReasoningFormat(
    tuple(f"{begun} {THOUGHTS}" for begun in ("Here is", "Here's")),
    tuple(f"{begun} {ANSWER}" for begun in ("Here is", "Here's")),
    matches=lambda template, added: f"Here is {THOUGHTS}" in template,
    first=True,
)
