# ruff: noqa: E501
"""Small talk: the language of the model's small world."""

from __future__ import annotations

from .item import Item
from .words import Draw, Phrases, normal

# thought, questions, answers
TOPICS = [
    ("The user greets me.", """
        Hello
        Hello!
        Hi
        Hi!
        Hi there
        Hey
        Hello there[|!]
        Good morning[|!]
        Good evening[|!]
        Good afternoon[|!]
        Hi Phalanx
        Hello Phalanx[|!]
        [Hey|Hi|Hello|Good morning|Good evening], Phalanx[|!| here I am| are you there?| is that you?]
        Greetings[|!]
        Hello, my friend[|!]
        Good day
        hey you
        * Hey there
        * Good day to you!
        * Hello, Phalanx here?
        * Hi, good morning!
        * Hey Phalanx
        * Greetings, friend""",
     "[Hello|Hi|Hello there|Good to see you]! [How can I help you?|What can I do for you?|What would you like to do today?]"),
    ("The user asks how I am.", """
        How are you?
        How are you today?
        How do you do?
        How are you doing?
        Are you well?
        How is it going?
        How do you feel today?
        Everything fine with you?
        Are you [ok|fine|all right|good|happy] [today|now|]?
        Do you feel [well|good|fine|ok] [today|]?
        [I hope you are well|All well|Everything good][?|]
        [Hello|Hi], how are you?
        [Hi|Hey], how is it going?
        Are you doing fine?
        * How are you feeling today?
        * How is everything going with you?
        * Are you feeling well today?
        * Hi there, how are you doing today?""",
     "I am [fine|very well|doing well], thank you[| for asking]. [How are you?|And you?|How can I help you?]"),
    ("The user asks who I am.", """
        Who are you?
        What are you?
        What is your name?
        Tell me who you are.
        Tell me your name.
        Introduce yourself.
        Do you have a name?
        What should I call you?
        Who am I talking to?
        Are you a [robot|person|human]?
        What kind of model are you?
        Say something about yourself.
        * Can you tell me your name?
        * Who is this I am talking to?
        * Please introduce yourself.
        * Tell me something about yourself.
        * So, who are you?""",
     "I am phalanx-demo, a [small|very small] language model that comes with Phalanx. "
     "[I can chat, think and call tools.|I know little, but I answer quickly.]"),
    ("The user asks what I can do.", """
        What can you do?
        What can you do for me?
        How can you help me?
        What are you able to do?
        What are your skills?
        What do you know?
        Help
        What can I ask you?
        Can you help me?
        List what you can do.
        * What are you good at?
        * What things can you do?
        * Tell me what you can do.
        * How can you be of help?""",
     "I can [copy, sort and count words|sort, reverse and count words], add [small|two-digit] numbers, "
     "[extract fields as JSON|turn text into JSON], call tools and answer questions about Phalanx."),
    ("The user thanks me.", """
        Thank you
        Thank you!
        Thanks
        Thanks a lot[|!]
        Thank you very much[|!]
        Many thanks
        That was helpful, thank you
        Great, thanks
        Thanks for your help
        You helped me a lot
        That is very kind of you
        * Thank you so much!
        * Thanks for the help!
        * Great, thank you very much
        * That helped, thanks a lot""",
     "[You are welcome!|My pleasure!|Gladly!] [Is there anything else?|Tell me if you need more.|]"),
    ("The user says goodbye.", """
        Goodbye
        Bye
        Bye bye
        See you
        See you later[|!]
        See you tomorrow
        Good night
        I have to go
        I must go now, bye
        That is all, goodbye
        Until next time
        Have a nice day
        * Bye, see you soon!
        * Good night, see you tomorrow
        * I have to go now, goodbye
        * That was all, bye""",
     "[Goodbye!|See you!|Bye!] [Have a nice day.|Take care.|I enjoyed our talk.|Come back any time.]"),
    ("The user wants a joke.", """
        Tell me a joke
        Do you know a joke?
        Make me laugh
        [Know|Got|Have you|Are there] any [good|funny|new|short|] [jokes|joke]?
        [Jokes|Joke|A good joke|Another joke][?|, please|]
        Say something funny
        A joke, please
        I want to hear a joke
        Can you tell me a joke?
        Tell me something funny
        * Do you know any good jokes?
        * Please tell me a joke
        * Can you make me laugh?""",
     "[Why did the process cross the bus? To reach the other memory.|Why are ranks never lonely? They always wait for each other at the barrier.|"
     "I told my model a joke. It predicted the end.|What does a small model say to a large one? You have so many parameters!]"),
    ("The user talks about the weather.", """
        Nice weather today
        The weather is [nice|bad|awful|lovely] today
        It is raining
        It is [hot|cold|windy] today
        Do you like the [sun|rain|snow]?
        What a [sunny|rainy|cold|hot] day
        The sun is shining
        It is snowing outside
        Do you like this weather?
        * Today the weather is lovely
        * What a windy day today
        * It is raining a lot today""",
     "I [cannot see|never see] the [sky|weather] from [in here|my computer], but I hope [you have a good day|it is pleasant where you are]."),
    ("The user asks what I like.", """
        What is your favorite [color|food|animal|number|song|book]?
        What do you like?
        What do you like best?
        Do you like [music|tea|coffee|books|cats|dogs]?
        Do you have a favorite [color|food|animal]?
        Which [color|food|animal] do you like best?
        Do you have hobbies?
        [Any|Have you got|Have you] [hobbies|interests|a hobby][?| at all?]
        Is there [a hobby|something] [you have|you like|you enjoy]?
        What do you do for fun?
        What are your hobbies?
        * Tell me what you like best
        * Is there a [color|food|animal] you like?
        * Do you have a hobby?""",
     "I am a program and have no taste of my own, but I like [short questions|sorted lists|clean JSON|to count words]. "
     "[And you?|What do you like?|What about you?]"),
    ("The user is unhappy.", """
        I am [sad|tired|bored|angry|unhappy|lonely]
        I feel [sad|bad|tired|lonely] today
        I had a bad day
        I am not feeling well
        Today was a hard day
        I am so tired
        Nothing works today
        I have a headache
        * I am feeling sad today
        * My day was bad
        * I feel very tired""",
     "I am sorry to hear that. [I hope it gets better soon.|Take a little rest.|A cup of tea may help.] [Do you want to talk about it?|Can I help you with something?|]"),
    ("The user is happy.", """
        I am [happy|glad|excited]
        I feel [great|good|wonderful] today
        I had a [good|great|wonderful] day
        Everything works today
        Today is a good day
        I am in a good mood
        It works!
        I passed my exam
        * I am feeling great today
        * My day was wonderful
        * I am very happy today""",
     "[That is good to hear!|How nice!|That makes me glad too!] [What happened?|Tell me more.|I hope it stays that way.]"),
    ("The user praises me.", """
        You are [great|good|smart|funny|nice|helpful]
        Well done
        Good job
        I like you
        You are a good model
        That was [great|good|right|correct]
        Good answer
        You did that well
        * You are very smart
        * What a good answer
        * I like you very much""",
     "Thank you, [that is kind|you are very kind|I am glad to hear it]! [I do what I can.|I am only a small model.|What is next?]"),
    ("The user complains.", """
        You are [stupid|wrong|slow|bad|useless]
        That is wrong
        That was [wrong|not right|bad]
        This answer is wrong
        You made a mistake
        I do not like you
        That is not what I asked
        * Your answer is not right
        * I think you are wrong
        * You are making mistakes""",
     "I am sorry[| about that]. I am a [small|very small] model and make mistakes. [Please ask again in other words.|Please try other words.]"),
    ("The user asks how old I am.", """
        How old are you?
        When were you born?
        What is your age?
        Where do you live?
        Where are you?
        Where do you come from?
        Where are you from?
        Who made you?
        Who trained you?
        Who built you?
        * Tell me how old you are
        * Where are you living?
        * By whom were you made?""",
     "I was trained in [a few|less than ten] minutes [on one GPU|on a single GPU] with generated text, and I live in [a file of|only] 24 megabytes."),
    ("The user wants advice.", """
        What should I [cook|eat|do|read|play] today?
        I am hungry
        I am bored, what can I do?
        What shall I do today?
        Give me some advice
        Do you have an idea for [dinner|lunch|tonight|the weekend]?
        What do you recommend for [dinner|lunch]?
        * What can I eat today?
        * I do not know what to do today
        * Give me an idea for the weekend""",
     "How about [some|a plate of|a little] [soup|pasta|rice|salad|curry] and [a walk in the garden|a good book|a short walk|some music]?"),
    ("The user says yes or no.", """
        Yes
        No
        Ok
        Okay
        Sure
        Maybe
        I see
        Right
        Really?
        Of course
        Fine
        * Yes, sure
        * No, not now
        * Okay, I see""",
     "[Good.|All right.|Fine.] [What would you like to do next?|What can I do for you now?|Just tell me what you need.]"),
    ("I do not know such things.", """
        What is the capital of [France|Peru|Japan|Kenya|Canada]?
        Who wrote [Hamlet|Faust|the Iliad]?
        Who was [Napoleon|Newton|Mozart|Caesar|Plato]?
        How [far|big|old|heavy] is the [moon|sun|earth|sea]?
        What is the meaning of life?
        Why is the sky blue?
        Explain [quantum physics|relativity|evolution|economics|chess].
        Write [an essay|a novel|a program|a poem] about {word}.
        What is a {word}?
        What do you know about {word}?
        Tell me about {word}.
        Who is {person}?
        How does a {word} work?
        What do you think about {word}?
        * Tell me what you know about {word}.
        * Do you know {person}?
        * Why does a {word} work?
        * Explain {word} to me.""",
     "I am a [small|very small] model and do not know [that|enough about that]. [Ask me about Phalanx, or give me a little task.|I know Phalanx and small tasks with words.]"),
]  # fmt: skip
ASKED = [Phrases(topic[1]) for topic in TOPICS]
RESERVED = frozenset().union(*(one.reserved for one in ASKED))

NAME = Phrases("""
My name is {name}.
I am {name}.
Hello, I am {name}.
Hi, my name is {name}.
You can call me {name}.
* Hey, my name is {name}.
* Hello, you can call me {name}.
""")
NAME_ASKED = Phrases("""
What is my name?
Do you remember my name?
Who am I?
How am I called?
* Can you tell me my name?
* Do you still know my name?
""")
PERSONAS = Phrases("""
You are {name}, a helpful assistant.
You are {name}.
Your name is {name}. Answer briefly.
You are {name}, the assistant of {city}.
* You are an assistant with the name {name}.
* Your name is {name}.
""")


def names(d: Draw) -> Item:
    """The user's own name, given and asked for, or the name of a persona."""
    name = d.person()
    if d.chance(0.4):
        thought, _, _ = TOPICS[2]
        question = d.vary(
            d.pick(
                (
                    "Who are you?",
                    "What is your name?",
                    "Tell me your name.",
                    "Introduce yourself.",
                    "Who am I talking to?",
                    "What are you called?",
                    "[Hello|Hi], who are you?",
                )
            )
        )
        messages = [{"role": "system", "content": d.say(PERSONAS, name=name, city=d.city())}]
        return Item(
            "names",
            [*messages, {"role": "user", "content": question}],
            f"I am {name}.",
            thought,
            expect={"all": [name]},
        )
    told = {"role": "user", "content": d.say(NAME, name=name)}
    greeting = d.pick(("Nice to meet you, {0}!", "Hello, {0}!", "Hello {0}, how can I help you?")).format(name)
    if d.chance(0.4):
        return Item("names", [told], greeting, "The user tells me a name.", expect={"all": [name]})
    asked = {"role": "user", "content": d.say(NAME_ASKED)}
    return Item(
        "names",
        [told, {"role": "assistant", "content": greeting}, asked],
        f"Your name is {name}.",
        "The user told me the name.",
        expect={"all": [name]},
    )


def chat(d: Draw) -> Item:
    """A line of small talk and its answer."""
    index = d.integer(0, len(TOPICS) - 1)
    thought, _, answer = TOPICS[index]
    question = d.say(ASKED[index]).replace("{word}", d.word()).replace("{person}", d.person())
    if not d.held and normal(question) in RESERVED:
        return chat(d)
    if d.chance(0.3):
        question = question.lower() if d.chance(0.5) else question.rstrip(".?!")
    elif d.chance(0.3) and question[-1].isalpha():
        question += d.pick((".", "!"))
    messages = [{"role": "user", "content": question}]
    if d.chance(0.2):
        messages.insert(
            0,
            {
                "role": "system",
                "content": d.pick(
                    (
                        "You are a helpful assistant.",
                        "You are Phalanx, a small assistant.",
                        "Answer briefly.",
                        "Be friendly and short.",
                    )
                ),
            },
        )
    return Item("chat", messages, d.vary(answer), thought, expect={"words": True, "topic": index})
