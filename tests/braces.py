"""Functions of C++, CUDA and JavaScript, found by their braces."""

import re
from collections.abc import Iterator

TEXT = r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
DIRECTIVE = r"^[ \t]*#(?:\\\n|[^\n])*"
TEMPLATE = r"`(?:\\.|[^`\\])*`"
# A set of characters in a regular expression.
SET = r"\[(?:\\.|[^\]\\\n])*\]"
# A regular expression follows an operator, an opening bracket or return: elsewhere a slash divides.
BEFORE = r"(?:(?<=[=(,:\[!&|?{;\n])|(?<=[=(,:\[!&|?{;\n] )|(?<=return ))"
PATTERN = rf"{BEFORE}/(?:\\.|{SET}|[^/\\\n\[*])(?:\\.|{SET}|[^/\\\n\[])*/"
HEAD = re.compile(r"(?:\)(?:\s*(?:const|mutable|noexcept|->[\w\s:<>*&]+))*|=>|\])\s*$")
NO_FUNCTION = re.compile(r"\s*(?:\}\s*)?(?:else\s+)?(?:if|for|while|switch|catch|with)\b")


def blank(text: str, script: bool) -> str:
    """Comments, strings and directives become blanks; lines stay."""
    skipped = "|".join([TEXT, TEMPLATE, PATTERN] if script else [TEXT, DIRECTIVE])
    return re.sub(skipped, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S | re.M)


def functions(text: str, script: bool = False) -> Iterator[tuple[str, int]]:
    """Each function's head, as one line, and its lines with it; script: of JavaScript. Raises where braces do not
    match."""
    text = blank(text, script)
    opened: list[tuple[int, str, int]] = []  # of each block: where its head begins, the head, parentheses around it
    begin = parentheses = 0  # of the statement at hand
    for found in re.finditer(r"[{};()]", text):
        at, one = found.start(), found[0]
        if one in "()":
            parentheses += 1 if one == "(" else -1
            continue
        if one == "{":
            head = text[begin:at]
            opened.append((begin + len(head) - len(head.lstrip()), head.strip(), parentheses))
            parentheses = 0
        elif one == "}":
            start, head, parentheses = opened.pop()
            if HEAD.search(head) and not NO_FUNCTION.match(head):
                yield " ".join(head.split()), text.count("\n", start, at) + 1
        elif parentheses:
            continue  # of a for
        begin = at + 1
    assert not opened and not parentheses, "brackets that are not closed"


NAME = re.compile(r"([\w$~]+(?:::\w+)*)\s*(?:= *(?:async |\[[^\]]*\])?)?(?:\(|=>)")


def name(head: str) -> str:
    """A function's, of its head; its last signs where it has none."""
    found = NAME.search(re.sub(r"\b__\w+__\s*\([^)]*\)", "", head))  # without attributes
    return found[1] if found else head[-2:]
