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
from . import ToolCallFormat

HEAD = Head(rf'\s{{0,8}}<｜DSML｜invoke name="{NAME}">', '<｜DSML｜invoke name="f">')
PARAMETER = Head(
    r'<｜DSML｜parameter name="([^"<>\n]{1,128})"(?: string="(?P<text>true|false)")?>',
    '<｜DSML｜parameter name="k" string="true">',
    '<｜DSML｜parameter name="k" string="false">',
    '<｜DSML｜parameter name="k">',
)
AROUND = Around('\n<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n")


def dsml(block: str, model: str) -> ToolCallFormat:
    """block: the tag around all calls. model: the model_type whose format it is."""
    open, close = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    tags = Tags(
        PARAMETER,
        "</｜DSML｜parameter>",
        ("</｜DSML｜invoke>",),
        (close,),
        open,
        before='<｜DSML｜parameter name="',
        behind='" string="true">',
        behind_json='" string="false">',
        after_end=(close, open, "<｜DSML｜invoke "),
    )
    return tagged_format(open, close, HEAD, tags, AROUND, model)


FORMAT = dsml("function_calls", "deepseek_v32")
