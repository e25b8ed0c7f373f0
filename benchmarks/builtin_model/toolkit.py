# ruff: noqa: E501
"""What tools are made of: kinds of argument with ways to phrase them, and verbs with their synonyms."""

from __future__ import annotations

from .words import COLORS, COUNT, PLACES, WEEKDAYS, Draw, Phrases

LANGUAGES = "English French German Spanish Italian Polish Dutch Swedish Greek Turkish Finnish Danish Czech".split()
LEVELS = ("low", "medium", "high")
SIZES = ("small", "medium", "large")


def amount(d: Draw, high: int):
    """A number from 2 on, and how it is written: small ones sometimes as a word."""
    number = d.number(2, high)
    return number, COUNT[number] if number <= 20 and d.chance(0.5) else str(number)


def same(value):
    return value, str(value)


# fmt: off
# kind: (argument names, JSON type or list of choices, maker of (value, as written), descriptions, how a request phrases it)
KINDS = {
    "city": (("city", "location", "place", "town", "destination"), "string", lambda d: same(d.city()),
             ("name of the city", "the city", "which city"), Phrases("""
        [in|for|at|near|around] {v}
        [in|for] [the city of|the city|downtown|central] {v}
        [over there in|here in] {v}
        * in the town of {v}
        * in {v}""")),
    "person": (("name", "person", "recipient", "user", "contact", "customer"), "string", lambda d: same(d.person()),
               ("name of the person", "who it is for", "the person"), Phrases("""
        for {v}
        for [my|our|the] [friend|customer|colleague|boss|guest|sister|brother] {v}
        [on behalf of|in the name of|as a favor to] {v}
        * for my neighbor {v}
        * for {v}""")),
    "date": (("date", "day", "on_date", "when"), "string", lambda d: same(d.date()),
             ("date as YYYY-MM-DD", "the day", "on which date"), Phrases("""
        on {v}
        [for|by|from] [the date|the day|] {v}
        [as of|dated|not before] {v}
        * on the date {v}
        * on {v}""")),
    "time": (("time", "at_time", "hour", "start_time"), "string", lambda d: same(d.time()),
             ("time as HH:MM", "time of day", "at what time"), Phrases("""
        at {v}
        at [exactly|about|around|] {v} [o'clock|sharp|]
        [from|by|before|after] {v}
        * at the time {v}
        * at {v}""")),
    "weekday": (("weekday", "day_of_week"), WEEKDAYS, lambda d: same(d.pick(WEEKDAYS)),
                ("day of the week", "weekday"), Phrases("""
        on {v}
        [next|this|every|coming] {v}
        [by|before|not later than] {v}
        * on {v}
        * next {v}""")),
    "count": (("count", "quantity", "number", "copies", "amount"), "integer", lambda d: amount(d, 99),
              ("how many", "number of pieces", "quantity"), Phrases("""
        {v} times
        {v} [pieces|copies|units]
        in a quantity of {v}
        [altogether|exactly|just] {v} [times|pieces]
        * {v} times
        * with a count of {v}""")),
    "minutes": (("minutes", "duration", "duration_minutes", "length"), "integer", lambda d: amount(d, 90),
                ("minutes", "duration in minutes", "how long in minutes"), Phrases("""
        for {v} minutes
        [with|after|within|in] {v} minutes
        [taking|which takes|for about] {v} minutes
        * lasting {v} minutes
        * for {v} minutes""")),
    "code": (("id", "code", "reference", "key", "number_id"), "string", lambda d: same(d.code()),
             ("identifier", "the code", "the reference"), Phrases("""
        with the [id|key|identifier|number] {v}
        [with|by|having|under] [code|reference|id|key] {v}
        under the reference {v}
        [number|no.|called|marked] {v}
        * with reference {v}
        * with the code {v}""")),
    "title": (("title", "text", "message", "note", "subject", "content"), "string", lambda d: same(d.phrase()),
              ("the text", "what it says", "title"), Phrases("""
        with the [text|words|message|note|line] "{v}"
        [titled|called|named|entitled] "{v}"
        [saying|and write|and say|reading] "{v}"
        [with|under] the [heading|subject|name] "{v}"
        * that says "{v}"
        * with the title "{v}\"""")),
    "color": (("color", "colour", "paint"), "string", lambda d: same(d.pick(COLORS)), ("the color", "which color"), Phrases("""
        in {v}
        in the color {v}
        [painted|colored|all in|made] {v}
        * in a {v} color
        * in {v}""")),
    "email": (("email", "to", "address", "mail_address"), "string", lambda d: same(d.email()),
              ("email address", "address to write to"), Phrases("""
        to {v}
        to the [address|mailbox|inbox] {v}
        [by mail to|over to|via] {v}
        * to the mail address {v}
        * to {v}""")),
    "price": (("price", "budget", "max_price", "limit"), "number", lambda d: same(d.decimal()),
              ("price in euros", "the most to pay"), Phrases("""
        for {v} euros
        for [at most|up to|about|no more than] {v} euros
        [costing|worth|paying] {v} euros
        * at a price of {v} euros
        * for {v} euros""")),
    "language": (("language", "lang", "target_language"), "string", lambda d: same(d.pick(LANGUAGES)),
                 ("the language", "language to use"), Phrases("""
        in {v}
        into {v}
        in the {v} language
        [using|speaking|with|written in] {v}
        * in the language {v}
        * in {v}""")),
    "place": (("room", "place", "area", "site"), "string", lambda d: same(d.pick(PLACES)), ("the room", "where"), Phrases("""
        in the {v}
        [for|at|near|by|behind|over in] the {v}
        [here in|down in|up in] the {v}
        * inside the {v}
        * in the {v}""")),
    "level": (("priority", "level", "importance", "urgency"), list(LEVELS), lambda d: same(d.pick(LEVELS)),
              ("priority", "how important"), Phrases("""
        with {v} [priority|importance|urgency]
        [at|on|of] {v} [priority|importance]
        with [priority|level|urgency] {v}
        [it has|this is] {v} priority
        * as {v} priority
        * with {v} priority""")),
    "size": (("size", "format"), list(SIZES), lambda d: same(d.pick(SIZES)), ("size", "how large"), Phrases("""
        in size {v}
        in [a|] {v} [size|format]
        [size|format] {v}
        * of size {v}
        * in the size {v}""")),
    "flag": (("urgent", "silent", "dry_run", "notify", "force", "public", "verbose"), "boolean", lambda d: same(True),
             ("true if wanted",), Phrases("""
        with {n} [on|]
        [and turn|turn|set|switch|making] {n} on
        [and|,] {n} [please|]
        {n} [enabled|active|on]
        * with {n} switched on
        * with {n}""")),
}

# Each line: words for one action; the first ones make tool names, all of them appear in requests and descriptions.
VERBS = [line.split() for line in """
get fetch retrieve show
create make add
delete remove erase
send post
book reserve
update change adjust
start launch
stop halt
open
close shut
count
find search locate
play
print
buy order purchase
sell
rename
move shift
copy duplicate
lock
unlock
plan schedule arrange
cancel
read
write
measure
paint
repair fix mend
clean wash
charge
load
save store
share
archive
export
import
merge combine join
split divide
rotate turn
water
ship deliver
track follow
record
sign
approve accept
reject decline refuse
assign
inspect examine check
restart reboot
enable activate
disable deactivate
draw sketch
pack
upload
download
rate
rent hire
test
compress
verify confirm""".strip().splitlines()]
