"""DeepSeek V3.2: markers around all calls; each argument is marked as a text or as JSON.

<｜DSML｜function_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from ..heads import NAME, Head
from ..tagged_arguments import Tags
from ..tagged_format import Around, tagged_format

OPEN, CLOSE = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
HEAD = Head(rf'\s{{0,8}}<｜DSML｜invoke name="{NAME}">', '<｜DSML｜invoke name="f">')
PARAMETER = Head(
    r'<｜DSML｜parameter name="([^"<>\n]{1,128})"(?: string="(?P<text>true|false)")?>',
    '<｜DSML｜parameter name="k" string="true">',
    '<｜DSML｜parameter name="k" string="false">',
    '<｜DSML｜parameter name="k">',
)
TAGS = Tags(
    PARAMETER,
    "</｜DSML｜parameter>",
    ("</｜DSML｜invoke>",),
    (CLOSE,),
    OPEN,
    before='<｜DSML｜parameter name="',
    behind='" string="true">',
    behind_json='" string="false">',
    after_end=(CLOSE, OPEN, "<｜DSML｜invoke "),
)
AROUND = Around('\n<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n")
FORMAT = tagged_format(OPEN, CLOSE, HEAD, TAGS, AROUND, "deepseek_v32")
