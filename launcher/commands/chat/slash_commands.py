"""Lines that begin with a slash: a function each, whose docstring is its line in /help."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

from .... import errors
from ....rank import json_decoding
from ...image_parts import data_url
from .conversation import Conversation
from .options import sampling

SWITCHES = {"on": True, "off": False, "default": None}
MAX_FILE = 1 << 20  # bytes


def run(conversation: Conversation, line: str) -> bool:
    """Execute a line. False: it ends the conversation. Raises FatalError with a message for the user."""
    word, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(word)
    if command is None:
        raise errors.FatalError(f"/{word} is no command; /help lists them", errors.USAGE)
    return command(conversation, rest.strip()) is not False


def _new(conversation: Conversation, rest: str) -> None:
    """start over"""
    conversation.messages, conversation.files, conversation.images = [], [], []


def _again(conversation: Conversation, rest: str) -> None:
    """another answer to your last message"""
    conversation.again()


def _undo(conversation: Conversation, rest: str) -> None:
    """forget your last message and its answer"""
    if conversation.undo() is None:
        raise errors.FatalError("there is nothing to forget", errors.USAGE)


def _system(conversation: Conversation, rest: str) -> None:
    """TEXT: what the model is told first; without a text, show it"""
    if rest:
        conversation.system = rest
    else:
        print(conversation.system or "(none)")


def _set(conversation: Conversation, rest: str) -> None:
    """NAME VALUE: temperature, top_p, … as the flags have them; `default` leaves it to the server; alone, show all"""
    known = sampling()
    if not rest:
        for name in known:
            print(f"{name} {'default' if conversation.fields[name] is None else conversation.fields[name]}")
        return
    name, _, value = rest.replace("=", " ").partition(" ")
    name = name.lstrip("-").replace("-", "_")
    if name not in known:
        raise errors.FatalError(f"{name} is none of {', '.join(known)}", errors.USAGE)
    conversation.fields[name] = None if value.strip() == "default" else _number(known[name].type, name, value.strip())


def _number(kind: type, name: str, value: str) -> float | int:
    try:
        return int(value) if kind is int else float(value)
    except ValueError:
        raise errors.FatalError(f"{name} is {value!r}: a number is needed", errors.USAGE) from None


def _thinking(conversation: Conversation, rest: str) -> None:
    """on, off or default: whether the model reasons first"""
    if rest not in SWITCHES:
        raise errors.FatalError("/thinking on, off or default", errors.USAGE)
    conversation.fields["enable_thinking"] = SWITCHES[rest]


def _file(conversation: Conversation, rest: str) -> None:
    """PATH: a text file that goes along with your next message"""
    path = os.path.expanduser(rest)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE + 1)
        text = content.decode()
    except OSError as error:
        raise errors.FatalError(f"/file {rest}: {error.strerror}", errors.USAGE) from None
    except UnicodeDecodeError:
        raise errors.FatalError(f"/file {rest}: it is no text", errors.USAGE) from None
    if len(content) > MAX_FILE:
        raise errors.FatalError(f"/file {rest}: it has more than {MAX_FILE >> 20} MiB", errors.USAGE)
    conversation.files.append((os.path.basename(path), text))
    print(f"{os.path.basename(path)}, {len(content)} bytes, goes along with your next message")


def _image(conversation: Conversation, rest: str) -> None:
    """PATH: an image that goes along with your next message"""
    path = os.path.expanduser(rest)
    try:
        conversation.images.append(data_url(path))
    except OSError as error:
        raise errors.FatalError(f"/image {rest}: {error.strerror}", errors.USAGE) from None
    print(f"{os.path.basename(path)} goes along with your next message")


def _save(conversation: Conversation, rest: str) -> None:
    """FILE: write the conversation, as JSON that a request may have as `messages`"""
    path = os.path.expanduser(rest)
    try:
        with open(path, "x", encoding="utf-8") as file:
            json.dump(
                {"system": conversation.system, "messages": conversation.messages}, file, ensure_ascii=False, indent=1
            )
    except OSError as error:
        raise errors.FatalError(f"/save {rest}: {error.strerror}", errors.USAGE) from None
    print(f"{len(conversation.messages)} messages are in {path}")


def _load(conversation: Conversation, rest: str) -> None:
    """FILE: go on with a conversation that was saved"""
    try:
        with open(os.path.expanduser(rest), "rb") as file:
            read = json_decoding.decode_object(file.read())
        messages, system = read["messages"], read["system"]
        if not isinstance(system, str) or not all(isinstance(one["role"], str) for one in messages):
            raise TypeError
    except OSError as error:
        raise errors.FatalError(f"/load {rest}: {error.strerror}", errors.USAGE) from None
    except (ValueError, KeyError, TypeError):
        raise errors.FatalError(f"/load {rest}: /save has not written this file", errors.USAGE) from None
    conversation.system, conversation.messages = system, messages
    print(f"{len(messages)} messages were read")


def _help(conversation: Conversation, rest: str) -> None:
    """this list"""
    for name, command in COMMANDS.items():
        print(f"  /{name:9} {command.__doc__}")
    print('  """        begins and ends a text of several lines; Ctrl-C stops an answer, Ctrl-D ends')


def _end(conversation: Conversation, rest: str) -> bool:
    """end"""
    return False


COMMANDS: dict[str, Callable[[Conversation, str], bool | None]] = {
    "help": _help,
    "new": _new,
    "again": _again,
    "undo": _undo,
    "system": _system,
    "set": _set,
    "thinking": _thinking,
    "file": _file,
    "image": _image,
    "save": _save,
    "load": _load,
    "exit": _end,
    "quit": _end,
}
