"""Seed-OSS: as Qwen3-Coder's calls, between markers of its own.

<seed:tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></seed:tool_call>
"""

from ..tagged_arguments import Tags
from ..tagged_format import Around, tagged_format
from .qwen3_coder import HEAD, PARAMETER

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
TAGS = Tags(PARAMETER, "</parameter>", ("</function>",), (CLOSE, OPEN), before="<parameter=", behind=">")
FORMAT = tagged_format(OPEN, CLOSE, HEAD, TAGS, Around("\n<function=", ">\n", "</function>\n"), "seed_oss")
