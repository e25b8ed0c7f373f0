"""Texts that a schema allows, for formats that write them as they are: as terminals of llguidance's Lark."""

from __future__ import annotations

import json
import re

from .argument_schema import Schema, Unwritable

LONGEST = 1 << 14  # characters of a pattern
ANY = "/(?s:.*)/"
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{OCTET}(\.{OCTET}){{3}}",
    "email": r"[A-Za-z0-9_+]{1,32}(\.[A-Za-z0-9_+]{1,32})*@[A-Za-z0-9]{1,32}(\.[A-Za-z0-9]{1,32})+",
}


def terminal(plain: Schema, strict: bool) -> str:
    """A terminal for the texts that a plain schema allows, which names none. Raises Unwritable."""
    found = [ANY]
    shortest, longest = plain.get("minLength", 0), plain.get("maxLength")
    if shortest or longest is not None:
        found.append(f"/(?s:.){{{int(shortest)},{'' if longest is None else int(longest)}}}/")
    if "pattern" in plain:
        found += _searched(plain["pattern"], strict)
    form = plain.get("format")
    if form in FORMATS:
        found.append(f"/{FORMATS[form]}/")
    elif form is not None and strict:
        raise Unwritable(f"texts of the format {json.dumps(form)} cannot be enforced in this model's calls")
    return " & ".join(found[1:] or found)


def _searched(pattern: str, strict: bool) -> list[str]:
    """A pattern may match anywhere in the text, unless it has anchors."""
    try:
        if len(pattern) > LONGEST:
            raise Unwritable(f"a pattern has {len(pattern)} characters, at most {LONGEST} can be enforced in calls")
        if "|" in _outermost(pattern) and re.search(r"[\^$]", pattern):
            raise Unwritable(f"the pattern {json.dumps(pattern)} has anchors beside alternatives")
        body = pattern.removeprefix("^")
        open_end = not re.search(r"(?<!\\)(\\\\)*\$$", body)
        body = body if open_end else body[:-1]
        before = "" if pattern.startswith("^") else "(?s:.*)"
        return [_regex(f"{before}(?:{body}){'(?s:.*)' if open_end else ''}")]
    except Unwritable:
        if strict:
            raise
        return []


def _outermost(pattern: str) -> str:
    """Without what stands in brackets."""
    pattern = re.sub(r"\\.|\[\^?\]?[^\]]*(\]|$)", "", pattern)  # a comment may open what nothing closes
    while (inner := re.sub(r"\([^()]*\)", "", pattern)) != pattern:
        pattern = inner
    return pattern


def _regex(pattern: str) -> str:
    from llguidance import LLMatcher

    written = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"].removeprefix("start: ")
    if LLMatcher.validate_grammar(json.dumps({"grammars": [{"lark_grammar": f"start: {written}"}]})):
        raise Unwritable(f"the pattern {json.dumps(pattern)} cannot be enforced in this model's calls")
    return written
