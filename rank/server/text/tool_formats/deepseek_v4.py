"""DeepSeek V4: calls as V3.2 writes them, between other markers.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="NAME">
<｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls>
"""

from .deepseek_v32 import dsml

FORMAT = dsml("tool_calls", "deepseek_v4")
