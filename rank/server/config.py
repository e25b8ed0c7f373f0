"""The server process's configuration. The launcher hands it over as JSON in a pipe, as it may hold API keys.

PHALANX_SERVER has the number of the pipe's file descriptor.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

import msgspec

from ..options import Options

T = TypeVar("T")
VARIABLE = "PHALANX_SERVER"
PUSH_GROUP = "/metrics/job/phalanx/instance/"  # of a Pushgateway: what precedes the name of one server of ours
PREDECESSOR = "PHALANX_PREDECESSOR"  # the name of the registry's file of the job that has submitted this one
SERVICE = "PHALANX_SERVICE"  # the name that a job and its successors share


class SamplingDefaults(msgspec.Struct, forbid_unknown_fields=True):
    """For requests that leave it open. None: the model's generation_config.json decides, then OpenAI's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    seed: int | None = None  # None: one is drawn for each request


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Settings of one of several models."""

    model_dir: str
    sampling: SamplingDefaults = msgspec.field(default_factory=SamplingDefaults)
    generation_config: bool = True  # the model directory's generation_config.json counts
    chat_template: str = ""  # path of a template that replaces the model's
    tool_call_parser: str = "auto"  # a file of text/tool_formats; "auto": the model's; "none": calls stay text
    reasoning_parser: str = "auto"  # a file of text/reasoning; "auto", "none": the same
    thinking: bool | None = None  # enable_thinking of requests that do not say
    mmproj: str = ""  # the file with the tower of a GGUF model
    images_per_prompt: int = 16  # most images of a request; 0: the model takes text alone


def named_alike(config: type[msgspec.Struct], options: Options) -> dict[str, Any]:
    """The options that a configuration takes under their own names."""
    return {name: getattr(options, name) for name in config.__struct_fields__ if name in options.__struct_fields__}


def model_settings(options: Options) -> dict[str, Any]:
    """The fields of ModelSettings."""
    sampling = SamplingDefaults(**named_alike(SamplingDefaults, options))
    return named_alike(ModelSettings, options) | {"model_dir": options.model, "sampling": sampling}


class ModelConfig(ModelSettings, forbid_unknown_fields=True, kw_only=True):
    """One of several models."""

    name: str
    options: str  # rank/options.py's Options as JSON, which rank 0 gets to load it
    notes: str = ""


class HandoverConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How and when to hand over. Times are Unix times."""

    command: list[str]  # submits the successor, and prints its number
    script: str = ""  # for the command's standard input
    look: list[str] = []  # tells whether job {job} is still there; []: nothing does
    directory: str  # to submit from
    environ: dict[str, str]
    end: float  # when the job is ended
    submit_at: float
    drain_at: float  # with or without a successor
    stop_at: float  # what is still open then ends with an error


class ServerConfig(ModelSettings, forbid_unknown_fields=True, kw_only=True):
    """Fixed for the life of the process; what is known only once the job is ready comes in `protocol.Ready`."""

    link: str  # path of the unix socket to listen on for rank 0, in a directory of mode 0700
    listen_fd: int  # inherited HTTP socket, bound by the launcher: TCP or unix
    url: str = ""  # what the ready line shows, such as http://127.0.0.1:2000/v1; "" derives it from the socket
    served_model_name: str = ""  # comma separated, the first is the name in answers; "" is the directory's name
    strict: bool = False  # another model name is answered with 404, an unknown field with 400
    api_keys: list[str] = []  # any of them lets a client in; [] lets everybody in
    key_names: dict[str, str] = {}  # whose they are, of those that have a name
    tls_cert: str = ""  # path of the certificate chain, PEM; "": HTTP without TLS
    tls_key: str = ""  # path of its key; "": the chain's file has it
    allowed_origins: list[str] = []  # whose web pages may call this server, such as http://localhost:3000; "*": any
    allowed_hosts: list[str] = []  # names of this server besides those it knows, for when it has no key; "*": any
    queue_size: int = 1024  # open sequences beyond max_num_seqs before 429
    requests_per_key: int = 0  # open ones of a key before 429; 0: half of the connections if there are other keys
    client_priorities: bool = False  # requests may have a priority
    response_store: int = 1024  # of /v1/responses how many are kept in memory; 0: none
    conversation_store: int = 1024  # how many conversations are kept in memory for requests that ask; 0: none
    record_conversation: bool = False  # of requests with a conversation_id that do not say
    admin: bool = False  # key holders may put the model to sleep, and set the log's level
    load_options: str = ""  # rank/options.py's Options as JSON, to load the only model again; "": there are several
    metrics_push: str = ""  # URL to which the figures are sent; "": nowhere
    otlp_endpoint: str = ""  # URL to which spans are sent; "": nowhere
    ui_server: bool = False  # serve the page of http/ui at /
    file_store: str = ""  # directory of /v1/files and /v1/batches; "": there are none
    restarts_expected: bool = False  # a new scheduler may come after one is lost: stay and answer 503 meanwhile
    keep_alive_interval: float = 10.0  # seconds of silence on a stream before a comment is sent
    models: list[ModelConfig] = []  # of several models; the first is loaded at the start. []: there is one
    idle_unload: float = 0.0  # seconds without a request after which the model is unloaded; 0: never
    mcp_config: str = ""  # path of mcp.json; "": no tool servers
    access_log: bool = False
    log_level: str = "info"
    log_format: str = "text"  # or "json"
    cpus: list[int] = []  # cores to run on; [] keeps the inherited ones
    parent_pid: int = 0  # who must be the parent, checked after PDEATHSIG is set; 0 skips the check
    timeout: float = 0.0  # seconds of silence after which rank 0 and this process give each other up; 0: never
    idle_exit: float = 0.0  # minutes without a request after which the job drains; 0: never
    registry_file: str = ""  # where to write how this server is found (server_registry.py); "": nowhere
    allowed_media_hosts: list[str] = []  # that images' URLs may name; "*": any public one. []: none
    allowed_media_dir: str = ""  # where the images lie that file: URLs may name; "": nowhere
    batch_job: str = ""  # the batch system's name for the job, for that file
    end_time: float = 0.0  # when the batch system ends it, Unix time; 0: not known
    handover: HandoverConfig | None = None  # to a successor, before that time
    predecessor: str = ""  # the name of the registry's file of the job that has submitted this one

    def of(self, model: ModelConfig) -> ServerConfig:
        """The configuration for one of several models."""
        fields = {name: getattr(model, name) for name in ModelSettings.__struct_fields__}
        return msgspec.structs.replace(self, served_model_name=model.name, **fields)

    def names(self) -> list[str]:
        """The model's names; the first one is the real one."""
        names = [name.strip() for name in self.served_model_name.split(",") if name.strip()]
        return names or [os.path.basename(os.path.abspath(self.model_dir))]


def take(kind: type[T], variable: str, verb: str) -> T:
    """The configuration from the pipe whose file descriptor the variable names."""
    number = os.environ.pop(variable, "")
    try:
        with open(int(number), "rb") as pipe:
            text = pipe.read()
    except (OSError, ValueError):
        why = f"{number!r} is no open file descriptor" if number else "it is not set"
        raise ValueError(
            f"{variable}: {why}: `phalanx {verb}` starts this process, it is not started by hand"
        ) from None
    return msgspec.json.decode(text, type=kind)
