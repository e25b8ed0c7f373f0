"""MiniMax M2: markers around all calls.

<minimax:tool_call>
<invoke name="NAME">
<parameter name="KEY">VALUE</parameter>
</invoke>
</minimax:tool_call>
"""

from ..heads import NAME, Head
from ..tagged_arguments import Tags
from ..tagged_format import Around, tagged_format

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
HEAD = Head(rf'\s{{0,8}}<invoke name="?{NAME}"?>', '<invoke name="f">')
PARAMETER = Head(r'<parameter name="?([^"<>\n]{1,128})"?>', '<parameter name="k">')
TAGS = Tags(
    PARAMETER,
    "</parameter>",
    ("</invoke>",),
    (CLOSE,),
    OPEN,
    before='<parameter name="',
    behind='">',
    after_end=(CLOSE, OPEN, "<invoke "),
)
AROUND = Around('\n<invoke name="', '">\n', "</invoke>\n")
FORMAT = tagged_format(OPEN, CLOSE, HEAD, TAGS, AROUND, "minimax_m2")
