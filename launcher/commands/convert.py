"""`phalanx convert`: quantise a model into a checkpoint that loads at once."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ... import child_python
from ...errors import MODEL, STOPPED, USAGE, FatalError
from ...logs import say
from ...rank import untrusted_files
from ...rank.gguf import mixes
from ...rank.gguf.checkpoint import is_gguf
from ...rank.options import ISQ_SPELLINGS, flag
from .. import hf_hub
from ..job import linux, mpi_env, secret_variables
from ..options import option_sources
from ..options.help import shown

if TYPE_CHECKING:
    from ...rank.server.text_process import RemoteText

HELP = "quantise a model into a checkpoint of few bits"
USAGE_TEXT = """phalanx convert SRC DST --to FORMAT [options]: quantise a model into a checkpoint that loads at once

  phalanx convert Qwen/Qwen3-8B qwen3-8b.gguf --to q4km
  phalanx convert Qwen/Qwen3-8B qwen3-8b-int4 --to gptq
  phalanx convert DIR DIR-int8 --to gptq --bits 8 --calibration text.txt

q4km and the others that begin with q or iq, f16, bf16 and f32 make a GGUF file, with tokenizer and chat template in it;
DST is its name. gptq, awq and marlin are three layouts of what GPTQ rounds: each matrix so that the layer's outputs
over a calibration text change least. A line for each layer tells the error of its outputs, the last one the perplexity
before and after. fp8 stores e4m3 in blocks of 128 x 128. Of these four, embeddings, norms and the head stay as they
are. It runs on one GPU where there is one, else on all cores.
"""
_GROUP = "Convert"
PROGRAM = ("-m", "phalanx.rank.convert")
CALIBRATED = "gptq", "awq", "marlin"
ROUNDING = "bits", "group", "sym", "desc_act", "calibration", "samples", "seqlen", "dtype"  # options of these alone
IN_FILES = (  # of GGUF
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "iq4_nl", "iq4_xs", *mixes.MIXES, "f32",
    "f16", "bf16",
)  # fmt: skip
_SPELLINGS = ISQ_SPELLINGS | {name.upper(): name for name in ("iq4_nl", "iq4_xs")}
PIECE = 1 << 20  # characters that are tokenised at a time
SECONDS, MEMORY = 60.0, 6 << 30  # that reading the tokenizer and the template may take, and each use of the tokenizer
HELD_OUT = 8  # windows of the text that only the perplexity is measured on


class ConvertOptions(msgspec.Struct, frozen=True, kw_only=True):
    source: Annotated[
        str,
        flag("--src", "--model", "--m", "--w", "--weight-path", group=_GROUP, metavar="SRC", positional=True,
             help="directory with config.json and safetensors, or a hub id"),
    ] = ""  # fmt: skip
    target: Annotated[
        str, flag("--dst", group=_GROUP, metavar="DST", positional=True, help="directory or file that is to be made")
    ] = ""
    to: Annotated[
        str,
        flag("--to", "--method", group=_GROUP, choices=(*CALIBRATED, "fp8", *IN_FILES), spellings=_SPELLINGS,
             help="the format of the result"),
    ] = "gptq"  # fmt: skip
    bits: Annotated[int, flag("--bits", group=_GROUP, metavar="N", low=4, high=8, help="of gptq's codes, 4 or 8")] = 4
    group: Annotated[
        int, flag("--group", "--group-size", group=_GROUP, metavar="N", low=0,
                  help="inputs that share a scale, a multiple of 32; 0: a whole row"),
    ] = 128  # fmt: skip
    sym: Annotated[
        bool, flag("--sym", group=_GROUP, off=("--no-sym",), help="zero points in the middle; awq has none such")
    ] = True
    desc_act: Annotated[
        bool, flag("--desc-act", group=_GROUP, off=("--no-desc-act",), help="gptq: columns of large inputs first")
    ] = False
    calibration: Annotated[
        str,
        flag("--calibration", group=_GROUP, metavar="FILE", help="a text like what is served; none: Python's manual"),
    ] = ""
    samples: Annotated[
        int, flag("--samples", group=_GROUP, metavar="N", low=1, help="pieces of the calibration text")
    ] = 128
    seqlen: Annotated[
        int, flag("--seqlen", group=_GROUP, metavar="N", low=16, help="tokens of each, at most the model's context")
    ] = 512
    device: Annotated[
        str, flag("--device", group=_GROUP, choices=("auto", "cuda", "cpu"), help="where it is computed")
    ] = "auto"
    dtype: Annotated[
        str, flag("--dtype", group=_GROUP, choices=("auto", "bf16", "f16", "f32"), help="of the arithmetic")
    ] = "auto"


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(ConvertOptions, argv, os.environ)
    if shown(chosen, USAGE_TEXT):
        return 0
    for note in chosen.notes:
        say(note)
    options = chosen.options
    _check(options)
    _refuse_unused(chosen)
    mpi_env.check_device(options.device)
    target = Path(options.target).expanduser()
    if target.exists() and not (target.is_dir() and not any(target.iterdir()) and options.to not in IN_FILES):
        raise FatalError(f"{target} is there already: name another place", USAGE)
    source = _find(options.source)
    windows = read_windows(options, source) if options.to in CALIBRATED else ([], [])
    tokenizer = _tokenizer(source) if options.to in IN_FILES else {}
    making = target.with_name(f"{target.name}.part")  # so that what is there under the name is whole
    try:
        making.mkdir(parents=True)
    except FileExistsError:
        raise FatalError(
            f"{making} is there already: another conversion runs, or one was killed; remove it then", USAGE
        ) from None
    except OSError as error:
        raise FatalError(f"{making} cannot be made: {error.strerror}", USAGE) from None
    try:
        made = making / target.name if options.to in IN_FILES else making
        _run(options, source, made, windows, tokenizer)
        made.replace(target)
    except KeyboardInterrupt:
        raise FatalError("stopped; nothing is left behind", STOPPED) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
    say(f"complete; serve it with: phalanx serve {shlex.quote(str(target))}")
    return 0


def _check(options: ConvertOptions) -> None:
    if not options.source or not options.target:
        raise FatalError("a model and a directory are needed: phalanx convert SRC DST --to gptq", USAGE)
    if options.bits not in (4, 8):
        raise FatalError(f"--bits {options.bits}: codes have 4 or 8 bits", USAGE)
    if options.group % 32:
        raise FatalError(f"--group {options.group}: kernels take groups of a multiple of 32 inputs", USAGE)
    if options.to in ("awq", "marlin") and (options.bits != 4 or options.desc_act):
        wrong = "--desc-act" if options.desc_act else f"--bits {options.bits}"
        raise FatalError(
            f"{wrong}: {options.to}'s layout has codes of 4 bits, their groups in order; use --to gptq", USAGE
        )
    if options.to == "marlin" and not options.sym:
        raise FatalError("--no-sym: Marlin's layout has no zero points; use --to gptq", USAGE)
    if options.to in IN_FILES and not is_gguf(options.target):
        raise FatalError(f"{options.target}: --to {options.to} makes a GGUF file; name one that ends in .gguf", USAGE)


def _refuse_unused(chosen: option_sources.ParsedOptions[ConvertOptions]) -> None:
    """Options that would change nothing. In the environment or a file they may be for other conversions."""
    to, where = chosen.options.to, "command line"
    given = {name: origin for name, origin in chosen.origins.items() if origin.startswith(where)}
    written = {name: origin.removeprefix(f"{where} (").removesuffix(")") for name, origin in given.items()}
    unused = [written[name] for name in ROUNDING if name in written and to not in CALIBRATED]
    if unused:
        raise FatalError(
            f"{', '.join(unused)}: --to {to} takes no option but --device; what rounds by a calibration text is --to "
            f"{', '.join(CALIBRATED)}",
            USAGE,
        )
    if to == "awq" and "sym" in written and chosen.options.sym:
        raise FatalError(f"{written['sym']}: awq's layout always has zero points; use --to gptq", USAGE)


def _find(model: str) -> Path:
    """The directory of a model; one at the hub is fetched, weights too."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and not is_gguf(path):
        raise FatalError(f"{model} is a file: name the directory that has config.json and safetensors", USAGE)
    if is_gguf(path):
        raise FatalError(f"{model} is a GGUF file: convert the directory with safetensors that it was made of", USAGE)
    if not hf_hub.is_id(model):
        raise FatalError(f"model {model!r}: there is no such directory", MODEL)
    return Path(hf_hub.model(model))


def _tokenizer(source: Path) -> dict[str, Any]:
    """The tokenizer in a GGUF file's metadata, with the chat template."""
    from ...rank.server.text import gguf_keys  # not for --help: it takes a third of a second

    config = _config(source)
    config = config.get("text_config") or config
    if "vocab_size" not in config:
        raise FatalError(f"{source / 'config.json'} has no vocab_size, which a GGUF file needs", MODEL)
    with _text(source) as text:
        return text.run(gguf_keys.keys_of_text, str(source), config["vocab_size"])


@contextlib.contextmanager
def _text(source: Path) -> Iterator[RemoteText]:
    """The model's tokenizer and template, in a process with limits: they are its authors', and may take any time."""
    from ...rank.server.api_error import ApiError
    from ...rank.server.text.load import TextSettings
    from ...rank.server.text_process import Limits, RemoteText

    limits = Limits(
        seconds=SECONDS, seconds_when_killing=SECONDS, memory=MEMORY, loading_seconds=SECONDS, loading_memory=MEMORY
    )
    try:
        text = RemoteText(TextSettings(str(source)), limits)
    except (OSError, ValueError) as error:
        raise FatalError(f"the tokenizer of {source} cannot be read: {error}", MODEL) from None
    try:
        yield text
    except ApiError as error:
        why = error.message
        if error.code == "text_limits":
            why = f"it takes more than {SECONDS:g} s or {MEMORY >> 30} GiB, or crashes"
        raise FatalError(f"the tokenizer of {source} cannot be used: {why}", MODEL) from None
    finally:
        text.close()


def _pieces(text: str) -> Iterator[str]:
    """The text in chunks that end with lines, where these are not too long."""
    at = 0
    while at < len(text):
        end = text.rfind("\n", at, at + PIECE) + 1 if len(text) - at > PIECE else len(text)
        end = end or at + PIECE
        yield text[at:end]
        at = end


def read_windows(options: ConvertOptions, source: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The calibration text as token ids in chunks of equal length, and others that are held out."""
    try:
        text = Path(options.calibration).expanduser().read_text(encoding="utf-8") if options.calibration else _manual()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise FatalError(f"--calibration {options.calibration}: {why}", USAGE) from None
    config = _config(source)
    context = config.get("text_config", config).get("max_position_embeddings") or options.seqlen
    length = min(options.seqlen, context)
    with _text(source) as model_text:
        ids = [id for piece in _pieces(text) for id in model_text.tokenizer.encode(piece, False)]
    windows = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    if len(windows) < 2:
        raise FatalError(
            f"the calibration text has {len(ids)} tokens: two pieces of {length} are needed; name a longer text with "
            "--calibration, or a lower --seqlen",
            USAGE,
        )
    # Evenly over the text, which may be of many subjects.
    windows = windows[:: max(1, len(windows) // (options.samples + HELD_OUT))][: options.samples + HELD_OUT]
    held_out = min(HELD_OUT, len(windows) // 2)
    return windows[held_out:], windows[:held_out]


def _config(source: Path) -> dict[str, Any]:
    try:
        return untrusted_files.read_json(source, "config.json")
    except OSError as error:
        raise FatalError(f"{source / 'config.json'}: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{source / 'config.json'} {error}", MODEL) from None


def _manual() -> str:
    """Chapters of Python's reference manual, which every Python brings along: English, tables and code."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FatalError("this Python has no manual (pydoc_data): name a text with --calibration", USAGE) from None
    return "\n\n".join(topics[name] for name in sorted(topics))


def _run(
    options: ConvertOptions,
    source: Path,
    target: Path,
    windows: tuple[list[list[int]], list[list[int]]],
    tokenizer: dict[str, Any],
) -> None:
    """In a process of its own: the launcher never imports torch. Raises FatalError where it fails."""
    question = {
        "source": str(source),
        "target": str(target),
        "to": options.to,
        "bits": options.bits,
        "group": options.group,
        "symmetric": options.sym and options.to != "awq",
        "ordered": options.desc_act,
        "device": options.device,
        "dtype": options.dtype,
        "windows": windows[0],
        "held_out": windows[1],
        "tokenizer": tokenizer,
    }
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as file:
        file.write(msgspec.json.encode(question))
        file.flush()
        environ = secret_variables.without(os.environ)
        process = subprocess.Popen(child_python.command(*PROGRAM, file.name), env=environ, preexec_fn=_child())
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so ends a job's time
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    if code:
        raise FatalError(f"{options.source} was not converted", code if code > 0 else 128 - code)


def _child() -> Callable[[], None]:
    """It ends with this process. Ctrl-C at a terminal is for this process, which then ends it without a traceback."""
    tie = linux.tie_to_parent()

    def prepare() -> None:
        tie()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    return prepare
