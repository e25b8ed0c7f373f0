"""Seed-OSS: as Qwen3-Coder's calls, between markers of its own.

<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
"""

from ..tagged_format import Around, tagged_format
from . import qwen3_coder

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
TAGS = qwen3_coder.TAGS._replace(kept=(CLOSE,), again=OPEN, after_end=(CLOSE, OPEN, qwen3_coder.FUNCTION), lines=False)
FORMAT = tagged_format(OPEN, CLOSE, qwen3_coder.HEAD, TAGS, Around("\n<function=", ">\n", "</function>\n"), "seed_oss")
