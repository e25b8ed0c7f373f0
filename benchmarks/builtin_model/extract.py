# ruff: noqa: E501
"""Extract the fields of a short text into JSON by a given schema."""

from __future__ import annotations

import json
from typing import Any

from .item import Item
from .tasks import made
from .words import COLORS, FOODS, MONTHS, PLACES, WEEKDAYS, Draw, Phrases

# name of the kind: other names of the field, JSON type, maker, sentences that tell it of {who}
FIELDS: dict[str, tuple[tuple[str, ...], str, Any, Any]] = {
    "name": (("name", "full_name", "person", "customer", "contact", "employee"), "string", Draw.full_name, ()),
    "age": (("age", "years", "age_in_years"), "integer", lambda d: d.number(18, 99), Phrases("""
        {who} is [|now|already|almost|about] {v} [years old|years of age].
        [At the age of|With|At] {v} [|years], {who} [is full of plans|works|travels a lot|still learns].
        The age of {who} is {v}.
        {who} has [the age of|an age over|reached the age of] {v}.
        {who} [turned|became|will be] {v} [|years old] [this year|last month|in spring|].
        {who}, {v} [years old|years of age|], [is here|likes it].
        * {who} has an age of {v} years.""")),
    "city": (("city", "town", "home", "location", "place_of_residence"), "string", Draw.city, Phrases("""
        {who} [lives|stays|works|grew up|was born|has lived for years] in {v}.
        [The home of {who}|The home town of {who}|Home|The place] is {v}.
        {who} [moved|went back|will move|returned] to {v} [last year|soon|].
        {who} [comes|is|is originally|wrote to us] from {v}.
        [In|Near] {v}, {who} [has|bought|owns|rents] [a house|a flat|a garden].
        {v} is [the town|the city|where|home] [of {who}|{who} lives|to {who}].
        * {who} has a home in {v}.""")),
    "email": (("email", "mail", "email_address"), "string", Draw.email, Phrases("""
        You can [write|send mail|send a letter] to {v}.
        The [email address|address|email|mail address] of {who} is {v}.
        [Mail|Post|Email|Everything] [goes|should go|can go] to {v}.
        {who} [reads mail at|uses|can be reached at|has the address|answers at] {v}.
        [Contact|Reach|Ask] {who} [at|via|under] {v}.
        * Write to {who} at {v}.""")),
    "date": (("date", "day", "start_date", "due_date", "appointment"), "string", Draw.date, Phrases("""
        {who} [comes|arrives|leaves|starts|has an appointment|will visit us] on {v}.
        [The date|The day|It|The meeting] is [on|] {v}.
        Everything is [planned|set|prepared|ready] for {v}.
        [On|From|Since] {v} {who} [is here|will be back|is away].
        {who} [was born on|chose|prefers|wrote on] {v}.
        * {who} is expected on {v}.""")),
    "time": (("time", "hour", "start_time", "arrival"), "string", Draw.time, Phrases("""
        {who} [arrives|comes|leaves|starts|gets up|calls] at {v}.
        It [starts|begins|ends|is planned] at {v}.
        The [time|hour|start] is {v}.
        [At|Around|By] {v} {who} [arrives|is ready|comes|eats].
        The clock [says|shows] {v} [then|when {who} comes].
        * {who} will be there at {v}.""")),
    "color": (("color", "favorite_color", "colour"), "string", lambda d: d.pick(COLORS), Phrases("""
        {who} [likes|loves|chose|prefers|wears|wants] [the color {v}|{v}].
        The [favorite color|color] [of {who}|here] is {v}.
        {who} paints [everything|the house|the door] {v}.
        [Everything|The coat|The car] of {who} is {v}.
        {v} is the [best|nicest|only] color for {who}.
        * {who} likes {v} best of all colors.""")),
    "order": (("order_id", "order", "reference", "ticket", "code"), "string", Draw.code, Phrases("""
        The [order number|reference|order|code|ticket|ticket number] is {v}.
        {who} has [ticket|order|the reference|the code|number] {v}.
        [It is about|This is about|They ask about|We look for] order {v}.
        {who} [placed|made|sent|cancelled] [order|the order] {v}.
        [The parcel|The letter|The box] [has|carries|shows] the [code|reference|number] {v}.
        * The number of the order is {v}.""")),
    "amount": (("quantity", "amount", "pieces", "count"), "integer", lambda d: d.number(2, 500), Phrases("""
        {who} [orders|needs|wants|bought|takes|sends] {v} [pieces|of them|units|boxes].
        The [quantity|amount|number of pieces|count] is {v}.
        [There are|We sent|We counted|It makes] {v} [pieces|of them|units|boxes] [for {who}|in all|].
        {v} [pieces|units|of them] [are for {who}|were ordered|will do].
        * {who} asks for {v} pieces.""")),
    "price": (("price", "total", "cost", "sum"), "number", Draw.decimal, Phrases("""
        The [price|cost|total|sum] is {v} [euros|dollars|francs].
        {who} [pays|paid|owes us|offers|will pay] {v} [euros|dollars|].
        It [costs|cost|makes|sells for] {v} [euros|dollars|].
        [For|With] {v} euros {who} [bought|gets|can have] it.
        {v} euros [is the price|are to be paid|is too much for {who}].
        * {who} has to pay {v} euros.""")),
    "item": (("item", "product", "article", "thing"), "string", Draw.word, Phrases("""
        {who} [wants|needs|likes|would like|bought|is looking for] [a|the|one] {v}.
        {who} buys [the|a] {v}.
        The [item|product|article|thing] is [called|a|the|named] {v}.
        [It is about|This is about] [a|the] {v}.
        The {v} [is for|goes to|belongs to] {who}.
        {who} [asked about|hopes for|dreams of|searches for|hunts for|waits for] [a|the|this] {v}.
        * {who} asks for the {v}.""")),
    "weekday": (("weekday", "day_of_week"), "string", lambda d: d.pick(WEEKDAYS), Phrases("""
        {who} [has time|comes|works|is at home|can come|is away] on {v}.
        The [best|right|only] day is {v}.
        [On|Every|Next|Each] {v} {who} [has time|is here|comes].
        {v} [is a good day|suits {who}|would be fine].
        * {who} is free on {v}.""")),
    "month": (("month", "holiday_month"), "string", lambda d: d.pick(MONTHS), Phrases("""
        {who} [goes on holiday|travels|comes back|starts|was here|moves] in {v}.
        The [month|best month|right month] is {v}.
        [In|Until|Since|Next] {v} {who} [is away|is on holiday|travels].
        {v} [is the month of choice|is when {who} travels].
        * {who} takes a holiday in {v}.""")),
    "room": (("room", "place", "meeting_place"), "string", lambda d: d.pick(PLACES), Phrases("""
        {who} [waits|works|is|sits|sleeps|meets us] in the {v}.
        The [place|room|meeting place] is the {v}.
        [We meet in|Come to|Look in|Go to] the {v}.
        The {v} is [where {who} waits|the place to meet].
        * You find {who} in the {v}.""")),
    "food": (("food", "favorite_food", "meal", "dish"), "string", lambda d: d.pick(FOODS), Phrases("""
        {who} likes [to eat|] {v} [most|best|].
        [For lunch|For dinner|At noon|Today] {who} [takes|has|eats|cooks|orders] {v}.
        {who} [ordered|cooked|loves|asked for|eats] {v}.
        The [food|meal|dish|favorite food] is {v}.
        * {who} wants to eat {v}.""")),
    "company": (("company", "employer", "firm"), "string", lambda d: d.invented().capitalize() + " Ltd", Phrases("""
        {who} [works|drives|writes|travels] for {v}.
        The [employer|company|firm] of {who} is {v}.
        {who} [is employed|is a manager|has worked for years|started] at {v}.
        {v} [pays|sent|hired|trusts] {who}.
        {who} [owns|joined|left|founded|represents] {v}.
        {who} has [a shop|a desk|an office|a contract|work|a position|a future] [at|with|in] {v}.
        * {who} has a job at {v}.""")),
}  # fmt: skip
EXTRACT = Phrases("""
[Extract|Read|Take|Get] the [fields|values|data] as JSON [with|by|after|following] this schema: {schema}\\nText: {text}
[Extract|Find|Get|Pull|Read] {names} [from|out of] [the|this] text [as JSON|and write JSON|and answer in JSON].\\nSchema: {schema}\\nText: {text}
Read [the|this] text and [fill in|complete|use] [this|the] JSON schema.\\n{schema}\\n\\n{text}
[Text|Input|Document|Note]: {text}\\n\\n[Return|Write|Give me|Answer with|Produce] JSON [that follows|for|after|in] this schema: {schema}
[Text|Input|Document|Note]: {text}\\n[Schema|JSON schema|Fields]: {schema}\\n[Fill it in.|Answer in JSON.|Extract the fields.|Give the JSON object.]
{text}\\n\\n[Write|Give|Return|Extract|Show] the fields {names} of this text as [a JSON object|JSON].
[Give me|Return|Write|Make|Build|Produce] a JSON object [with|of|that has] the [fields|keys|entries] {names} [for|out of|about|based on] [this text|the text|the following text|the text below].\\n{text}
[Give me|Return|Write|Make|Build] a JSON object with the [fields|keys|entries] {names}.\\nText: {text}
[Turn|Convert|Change|Put] [this|the] text into [JSON|a JSON object] with [the|exactly the] [keys|fields] {names}.\\n{text}
[Find|Get|Look for|Search] {names} in [this|the] text and [answer with|write|return|reply in] JSON: {text}
{text}\\n\\n[Find|Get|Look for|Extract|Pick out|Collect] {names} [here|in it|in this text|] and [answer with|write|return|reply in|show] [JSON|a JSON object].
[Text|Input]: {text}\\n[Keys|Fields|Wanted|Entries]: {names}\\n[Answer with a JSON object.|Write JSON.|JSON only.|Extract them.]
From the text "{text}" [extract|take|read] {names} as JSON.
[Use|Follow|Apply|Take] the schema {schema} [and extract JSON from|for|on] [this|the following] text: {text}
{text}\\n\\n[Now|Please|Then|So|Next,|From this text,] [give me|show me|tell me|write|list|I want|I need] [the fields|the values of|the keys|] {names} [as JSON|in JSON|as a JSON object|in a JSON object|and use JSON].
{text}\\n\\n[Look at|Go through|Use|Study|Take|Have a look at] the [text|lines] [above|] and [tell me|show me|list|write|send me|hand me|let me have] {names} [as JSON|in JSON|as one JSON object].
[Give|Show|Send|Write|Build|Produce] [me|] [a JSON object|JSON|one object] with the [keys|fields|entries] {names}, [found|read|copied|filled|drawn|lifted|gathered|obtained|derived|chosen|pulled|quoted|collected|sourced|picked|borrowed|retrieved|fetched|parsed|selected|got|worked out|cut|built|made|learned|won|split|put together] [from|in|out of|with|by] [this|the|the following|my|our] [text|note|story|letter|lines].\\n{text}
[Give|Show|Send|Write|Build|Produce|Make|Create] [me|] [a JSON object|JSON|one object] with [the|] [keys|fields|entries] {names}, {w} [from|in|out of|with|by] [this|the|the following|my|our] [text|note|story|letter|lines].\\n{text}
[Extract|Find|Collect|Write|I need] {names}, {w} [from|in|out of|with] [this|the|the following|my] [text|note|story] [as JSON|in JSON|]: {text}
[Give|Show|Send|Write|Build|Produce] [me|] [a JSON object|JSON|one object] with the [keys|fields|entries] {names}, [from|all in|as in|and use|out of|based on|that is, for] [this|the|the following] text.\\n{text}
[Extract|Find|Get|Take|Collect] {names}, [found|read|copied|filled|drawn|lifted|gathered|obtained|derived|chosen|pulled|quoted|collected|sourced|picked|borrowed|retrieved|fetched|parsed|selected|got|worked out|cut|built|made|learned|won|split|put together|all of them|as told|please,] [from|in] [this|the following|my] [text|note|story|letter][, as JSON|, and write JSON|].\\n{text}
I need [the values of|the fields|the keys|] {names} as JSON. [The text is:|Text:|Here is the text:] {text}
[What are|Tell me|List] {names} [in|according to] this text? [Use JSON.|Answer as JSON.|Reply with JSON.]\\n{text}
* Text: {text}\\nExtract the fields {names} as a JSON object with this schema: {schema}
* Return a JSON object with the keys {names}, taken from this text.\\n{text}
* Fill in the JSON schema {schema} from this text: {text}
* {text}\\n\\nRead the text and give me {names} as JSON.
""")
GENERIC = Phrases("""
[The|Its|Their|His|Our|Her] {n} is {v}.
{n}: {v}[.|;|,|]
{n} = {v}.
[As|For the|For] {n} we [have|got|wrote|know|noted] {v}.
{v} is the {n}.
[With|It has|We have|There is] the {n} {v}.
The {n} [was|would be|should be|must be|says|reads] {v}.
[We know|We heard|They say|Note] that the {n} is {v}.
* The {n} given is {v}.
* {n}: {v}.
""")
OPENING = Phrases("""
[This is|This text is|Here is something|A note|A letter|We talk] about {who}.
{who} [wrote|called|came|spoke|talked] to us [today|yesterday|this morning|last week|].
We [spoke|talked|met|had lunch] with {who} [today|yesterday|last week|].
Here is what we [know about|heard of|wrote about] {who}.
[Our|A new|An old|Another] [customer|client|contact|guest] is {who}.
Name: {who}.
[A message|A call|A letter|An order|Word|Greetings|A question|A visit|Mail|A wish] from {who} [came in|arrived|reached us|is here|was noted|].
[There was|We had|Here comes|Now there is|We got|I have|You have] [a call|a message|something|a letter|an answer|mail|a visit|a request] from {who}.
There [was|is|came] [something|a person|a guest|somebody|a man|a woman] [called|named|with the name] {who}.
[The text is about|The subject is|The person is|It concerns|The case of] {who}.
[Dear team|Hello all|Good news], {who} [is here|has arrived|is back].
* There is news from {who}.
* We heard from {who}.
""")


def field_name(d: Draw, names: tuple[str, ...]) -> str:
    """A field's name; held-out ones are new combinations."""

    def make():
        name = d.pick(names)
        if d.held or d.chance(0.3):
            name = d.pick(("{0}_{1}", "{1}_{0}")).format(
                name,
                d.pick(
                    (
                        "value",
                        "info",
                        "entry",
                        "data",
                        "field",
                        "main",
                        "first",
                        "new",
                        "given",
                        "known",
                        "text",
                        "client",
                    )
                ),
            )
        return name

    return d.value(make)


def extract(d: Draw) -> Item:
    """Fields of a short text as a JSON object; a field the text does not tell is null."""
    who, chosen = d.full_name(), d.some([kind for kind in FIELDS if kind != "name"], d.integer(2, 5))
    told, wanted, properties = [d.say(OPENING, who=who)], {}, {}
    with_name = d.chance(0.6)
    for kind in ["name"] * with_name + chosen:
        names, kind_type, maker, phrases = FIELDS[kind]
        name = field_name(d, names) if d.chance(0.75) or kind == "name" else d.value(d.invented)
        if name in wanted:
            continue
        value = who if kind == "name" else maker(d)
        properties[name] = {"type": kind_type}
        wanted[name] = value
        readable = name.replace("_", " ")
        if kind == "name":
            continue
        if name.split("_")[0] not in " ".join(names) or d.chance(0.25):
            told.append(d.say(GENERIC, n=readable, v=value))
        elif d.chance(0.03):
            wanted[name] = None
        else:
            told.append(d.say(phrases, who=d.pick((who, who.split()[0])), v=value))
    middle = told[1:]
    d.random.shuffle(middle)
    for kind in d.some(sorted(FIELDS), 1):  # a sentence that nobody asked about
        if kind not in chosen and kind != "name" and d.chance(0.5):
            middle.insert(d.integer(0, len(middle)), d.say(FIELDS[kind][3], who=who, v=FIELDS[kind][2](d)))
    order = d.some(list(wanted), len(wanted))
    schema = json.dumps({"type": "object", "properties": {name: properties[name] for name in order}})
    text = " ".join([told[0], *middle])
    question = d.say(EXTRACT).replace("\\n", "\n").format(text=text, schema=schema, names=", ".join(order), w=d.word())
    answer = {name: wanted[name] for name in order}
    thought = "The fields are " + ", ".join(order) + "."
    return made("extract", question, json.dumps(answer, ensure_ascii=False), thought, json=answer)
