# ruff: noqa: E501
"""Tools that many programs have, with ways to ask for them, and the kinds of argument that only they use."""

from __future__ import annotations

from .toolkit import same
from .words import FOODS

CURRENCIES = "USD EUR GBP JPY CHF SEK NOK DKK PLN CZK".split()

# fmt: off
# (words of the name, description, (argument kinds; the first are required), requests)
FAMILIAR = [
    ("get_weather current_weather weather_report", "Get the weather of a city.", "city", """
        [What is|What's|How is] the weather [like|] [in|at|around] {city} [today|now|right now|]?
        [Is it|Will it be] [raining|sunny|cold|warm|windy|snowing] in {city} [today|now|]?
        [Tell me|Show me|Check|Give me] the weather [in|for|at] {city}.
        Do I need [an umbrella|a coat|sunglasses] in {city}?
        Weather [in|for] {city}[?|]
        I [travel|go|fly] to {city}, [what is|how is] the weather [like|there|]?
        * What weather does {city} have?
        * Tell me how the weather is in {city}."""),
    ("get_forecast weather_forecast", "Get the weather forecast of a city for a date.", "city date", """
        What will the weather be [like|] in {city} on {date}?
        [Forecast|Weather forecast] [for|in] {city} on {date}[, please|].
        [Will it|Is it going to] [rain|snow|be sunny|be cold] in {city} on {date}?
        [Tell me|Show me|Check] the [forecast|weather forecast] of {city} for {date}.
        * What is the weather forecast for {city} on {date}?"""),
    ("get_time current_time local_time", "Get the current time in a city.", "city", """
        What time is it [now|] in {city} [now|]?
        [Tell|Show] me the [time|local time|hour] in {city}.
        How late is it in {city}?
        [Which time|What time] do they have in {city}?
        [Time|Local time] in {city}[?|]
        * What is the current time in {city}?
        * Tell me what time it is in {city}."""),
    ("send_email write_mail", "Send an email with a text to an address.", "email title", """
        [Send|Write] [an email|a mail|mail] to {email} [with the text|saying|with|:] "{title}".
        [Mail|Email] [the words|] "{title}" to {email}.
        [Email|Mail] {email} [with the words|and say|:] "{title}".
        {email} should get an email [saying|with] "{title}".
        * Send a mail to {email} that says "{title}".
        * Write "{title}" in an email to {email}."""),
    ("send_message text_person", "Send a text message to a person.", "person title", """
        [Send|Write|Give] {person} the message "{title}".
        [Tell|Text|Message] {person} [that|:|] "{title}".
        [Text|Message] {person}: {title}
        [Message|Send|Text] "{title}" to {person}.
        Let {person} know "{title}".
        * Send a message to {person} that says "{title}"."""),
    ("set_timer start_timer", "Start a timer for some minutes.", "minutes", """
        [Set|Start|Make|Run] a timer [for|of|with] {minutes} minutes.
        [Wake|Call|Warn] me in {minutes} minutes.
        [Timer|A timer], {minutes} minutes [please|].
        [Count down|Wait] {minutes} minutes [and tell me|for me|].
        * Start the timer for {minutes} minutes.
        * Let a timer run for {minutes} minutes."""),
    ("set_alarm wake_up", "Set an alarm for a time of day.", "time", """
        [Set|Put|I need|Make] an alarm [for|at] {time}.
        [Wake|Get] me [up|] at {time} [please|tomorrow|].
        I [want|have|need] to get up at {time}.
        [Alarm|An alarm] at {time}[, please|].
        * Set the alarm to {time}.
        * Please wake me up at {time}."""),
    ("create_event add_appointment", "Put an event into the calendar.", "title date time", """
        Put "{title}" into my calendar on {date} at {time}.
        Create an event "{title}" on {date} at {time}.
        I have an appointment "{title}" on {date} at {time}.
        * Add the event "{title}" to my calendar for {date} at {time}."""),
    ("set_reminder remind", "Remind a person of something at a time.", "title time", """
        Remind me of "{title}" at {time}.
        At {time}, remind me: {title}
        Set a reminder "{title}" for {time}.
        * Please remind me at {time} of "{title}"."""),
    ("translate_text translate", "Translate a text into another language.", "title language", """
        [Translate|Put] [|the words|the phrase] "{title}" into {language}.
        How do [you|I|they] say "{title}" in {language}?
        What is "{title}" [in|called in] {language}?
        [Say|Write|Give me] "{title}" in {language}.
        I need "{title}" in {language}.
        "{title}" in {language}[, please|?|]
        * Translate the text "{title}" to {language}.
        * What does "{title}" mean in {language}?"""),
    ("play_music play_song", "Play a song by its title.", "title", """
        [Play|Put on|Start] [the song|the track|] "{title}" [please|now|for me|].
        I [want|would like|need] to [hear|listen to] [|the song] "{title}".
        [Music|Song]: "{title}"[, please|].
        * Let me hear the song "{title}"."""),
    ("web_search search_web", "Search the web for a text.", "title", """
        [Search|Browse|Look through] the [web|internet|net] for "{title}".
        [Look up|Look for|Google|Search] "{title}" [on|in] the [web|internet|net].
        [Find|Get|Show] [pages|sites|something|articles] about "{title}" [online|on the internet|].
        What does the [web|internet] say about "{title}"?
        * Search for "{title}" on the web.
        * Find "{title}" on the web."""),
    ("book_table reserve_table", "Book a table in a restaurant.", "count time", """
        [Book|Reserve|Get] [a table|us a table] for {count} [people|persons|guests|] at {time}.
        A table for {count} at {time}[, please|].
        We are {count} [people|guests] and want to eat at {time}.
        Dinner for {count} at {time}, [reserve a table|get a table].
        * I need a table for {count} people at {time}."""),
    ("book_flight find_flight", "Book a flight to a city on a date.", "city date", """
        [Book|Reserve|Buy|Find] [a flight|a plane|me a flight] to {city} on {date}.
        I [want|need|have] to [fly|travel by plane] to {city} on {date}.
        Get me [a plane|a seat|a flight] to {city} [on|for] {date}.
        On {date} I fly to {city}, [book it|get me a flight].
        * Book me on a flight to {city} for {date}."""),
    ("find_hotel book_hotel", "Find a hotel in a city under a price.", "city price", """
        [Find|Book|Get|Search] [a hotel|me a hotel|a hotel room] in {city} for [at most|under|up to|] {price} euros.
        I need a [room|hotel|bed] in {city} for [at most|] {price} euros.
        Which hotel in {city} costs [less than|at most|under] {price} euros?
        [Hotel|Hotels] in {city} [under|up to] {price} euros[?|]
        * Look for a hotel in {city} for {price} euros."""),
    ("track_parcel parcel_status", "Find out where a parcel is.", "code", """
        Where is [my|the|our] [parcel|package|delivery|box] {code} [now|]?
        [Track|Follow|Trace|Locate] [the|my] [parcel|package] {code}.
        When [does|will] [the|my|] [parcel|package] {code} arrive?
        What happened to [package|parcel|my parcel] {code}?
        [Find out where|I want to know where] [parcel|package] {code} is.
        * Where is the parcel with the number {code}?
        * Find my parcel {code}."""),
    ("order_status get_order", "Look up the status of an order.", "code", """
        What is the [status|state] of [order|my order] {code}?
        How is [my|the] order {code} doing?
        [Look up|Check|Show me|Find] [order|my order|the order] {code}.
        [Is|Was] [order|my order] {code} [ready|sent|shipped] [yet|already|]?
        * Tell me the status of the order {code}."""),
    ("switch_light light_on", "Switch the light of a room on or off.", "place onoff", """
        [Turn|Switch|Put] {onoff} the [light|lights|lamp] in the {place}.
        [Turn|Switch|Put] the [light|lights|lamp] in the {place} {onoff} [please|now|].
        [Light|Lights|Lamp] {onoff} in the {place}[, please|].
        The {place} needs its light {onoff}.
        [I want|Make|I need] the {place} [light|lamp] {onoff}.
        * Switch the light in the {place} {onoff}.
        * Turn the {place} light {onoff}."""),
    ("set_temperature set_heating", "Set the heating of a room to a temperature.", "place degrees", """
        [Set|Turn|Put] the [heating|heater|radiator] in the {place} to {degrees} degrees.
        [Make it|I want|It should be] {degrees} degrees in the {place}.
        [Heat|Warm|Cool] the {place} to {degrees} degrees.
        {degrees} degrees in the {place}[, please|].
        * Set the temperature in the {place} to {degrees} degrees."""),
    ("stock_price get_quote", "Get the price of a share by its symbol.", "symbol", """
        What is the [share|stock] price of {symbol}?
        How [much is|high is|much costs] [a share of|the stock|one share of|] {symbol}?
        [Stock price|Share price|Quote] [of|for] {symbol}[?|].
        [Check|Look up|Give me] [the stock|the share|] {symbol}.
        * Tell me the stock price of {symbol}."""),
    ("convert_currency exchange_money", "Convert money from one currency into another.", "number currency to_currency", """
        [Convert|Exchange|Change|Turn] {number} {currency} [to|into] {to_currency}.
        How much [is|are] {number} {currency} in {to_currency}?
        How many {to_currency} [are|is|make] {number} {currency}?
        [I have|Here are] {number} {currency}, [how much is that|what is it] in {to_currency}?
        What do I get in {to_currency} for {number} {currency}?
        * How many {to_currency} do I get for {number} {currency}?"""),
    ("add_numbers calculate_sum", "Add two numbers.", "first second", """
        What is {first} [plus|and|+] {second}?
        [Add|Sum|Sum up] {first} [and|to|with] {second}.
        [Compute|Calculate|Find|Give me] [the sum of {first} and {second}|{first} + {second}|{first} plus {second}].
        How much is {first} [plus|+] {second}?
        * What is the sum of {first} and {second}?"""),
    ("roll_dice throw_dice", "Roll some dice.", "count", """
        [Roll|Throw|Cast] {count} [dice|dices|of your dice] [for me|please|].
        [Let me see|Show me|I want] a [roll|throw] of {count} dice.
        {count} dice[, please|].
        * Please roll {count} of the dice."""),
    ("order_food deliver_meal", "Order food to be delivered.", "food count", """
        Order {count} portions of {food}.
        I am hungry, order {count} times {food}.
        Get me {count} portions of {food}.
        * Please order {food}, {count} portions."""),
    ("call_person phone", "Call a person by phone.", "person", """
        [Call|Phone|Ring] {person} [for me|please|now|].
        I [want|need|have] to [talk to|speak with|call] {person} [on the phone|by phone|].
        [Make|Start] a [call|phone call] to {person}.
        [Dial|Get me] {person} [on the phone|].
        * Give {person} a call.
        * Please phone {person}."""),
    ("create_note save_note", "Save a note.", "title", """
        [Take|Make|Write] a note: {title}
        [Note down|Note|Write down|Jot down] "{title}".
        [Save|Keep|Store] [the|a] note "{title}".
        I must not forget "{title}", [note it|make a note].
        * Write a note that says "{title}"."""),
    ("create_user add_account", "Create an account for a person with an email address.", "person email", """
        Create an account for {person} with the email {email}.
        Add the user {person}, {email}.
        {person} needs an account, the email is {email}.
        * Make a new account for {person} with {email}."""),
    ("get_distance route_length", "Get the distance between two cities.", "origin city", """
        How [far|long] is [it|the way|the road|the trip] from {origin} to {city}?
        What is the distance [from|between] {origin} [and|to] {city}?
        Distance [between|from] {origin} [and|to] {city}[?|]
        [Tell me|Find|Calculate] the [distance|way] from {origin} to {city}.
        How many [miles|hours] from {origin} to {city}?
        * How far apart are {origin} and {city}?
        * How many kilometers are between {origin} and {city}?"""),
    ("run_command execute", "Run a command on a host.", "host title", """
        [Run|Execute|Launch] [|the command] "{title}" on [|the host|the machine] {host}.
        On {host}, [run|execute|launch] [the command|] "{title}".
        [Let|Make] {host} [run|execute] "{title}".
        * Start the command "{title}" on {host}."""),
    ("read_file open_file", "Read a file by its path.", "path", """
        [Read|Open|Load|Print] [the file|] {path}.
        What is [in|inside|written in] [the file|] {path}?
        Show me [the file|what is in|the content of|] {path}.
        [Give me|I need] the [content|text|lines] of {path}.
        * What does the file {path} contain?"""),
    ("queue_status list_jobs", "List the jobs of a user in the queue.", "person", """
        Which jobs [does {person} have|of {person} are] in the queue?
        [Show|List|Print] [the jobs|all jobs|the queue] of {person}.
        [Is|Has] {person} [running any job|anything in the queue]?
        [How many|Which] jobs does {person} have [waiting|]?
        * What jobs of {person} are in the queue?"""),
]

# Kinds that only familiar tools use.
EXTRA = {
    "onoff": (("on", "enabled", "state_on"), "boolean", lambda d: d.pick(((True, "on"), (False, "off"))), ("true for on",)),
    "degrees": (("temperature", "degrees", "target"), "number", lambda d: same(d.number(15, 28)), ("degrees celsius",)),
    "symbol": (("symbol", "ticker"), "string", lambda d: same(d.value(lambda: d._syllables(1).upper()[:4])), ("stock symbol",)),
    "number": (("amount", "value"), "number", lambda d: same(d.number(2, 5000)), ("how much",)),
    "currency": (("from_currency", "source"), "string", lambda d: same(d.pick(CURRENCIES)), ("currency to convert from",)),
    "to_currency": (("to_currency", "target_currency"), "string", lambda d: same(d.pick(CURRENCIES)), ("currency wanted",)),
    "first": (("a", "x", "first"), "integer", lambda d: same(d.number(2, 9999)), ("first number",)),
    "second": (("b", "y", "second"), "integer", lambda d: same(d.number(2, 9999)), ("second number",)),
    "food": (("food", "dish", "meal"), "string", lambda d: same(d.pick(FOODS)), ("what to eat",)),
    "origin": (("origin", "from_city", "start"), "string", lambda d: same(d.city()), ("where it starts",)),
    "host": (("host", "node", "machine"), "string", lambda d: same(d.value(lambda: f"node{d.integer(1, 999)}")), ("host name",)),
    "path": (("path", "file", "filename"), "string",
             lambda d: same("/" + "/".join(d.words(1, 3)) + d.pick((".txt", ".json", ".py", ".log", ""))), ("path of the file",)),
}
