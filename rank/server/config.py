"""The server process's configuration, which the launcher hands over as JSON in the environment: PHALANX_SERVER."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import msgspec

from ..options import Options

T = TypeVar("T")
VARIABLE = "PHALANX_SERVER"


class SamplingDefaults(msgspec.Struct, forbid_unknown_fields=True):
    """For requests that do not say. None: the model's generation_config.json decides, then OpenAI's default."""

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
    """What each of several models has of its own."""

    model_dir: str
    sampling: SamplingDefaults = msgspec.field(default_factory=SamplingDefaults)
    generation_config: bool = True  # the model directory's generation_config.json counts
    chat_template: str = ""  # path of a template that replaces the model's
    thinking: bool | None = None  # enable_thinking of requests that do not say


def model_settings(options: Options) -> dict[str, Any]:
    """The fields of ModelSettings."""
    return {
        "model_dir": options.model,
        "sampling": SamplingDefaults(**{name: getattr(options, name) for name in SamplingDefaults.__struct_fields__}),
        "generation_config": options.generation_config,
        "chat_template": options.chat_template,
        "thinking": options.thinking,
    }


class ModelConfig(ModelSettings, forbid_unknown_fields=True, kw_only=True):
    """One of several models."""

    name: str
    options: str  # rank/options.py's Options as JSON, which rank 0 gets to load it
    notes: str = ""


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
    requests_per_key: int = 0  # open ones of a key before 429; 0: no limit
    response_store: int = 1024  # of /v1/responses how many are kept in memory; 0: none
    conversation_store: int = 1024  # how many conversations are kept in memory for requests that ask; 0: none
    record_conversation: bool = False  # of requests with a conversation_id that do not say
    ui_server: bool = False  # serve the page of http/ui at /
    file_store: str = ""  # directory of /v1/files and /v1/batches; "": there are none
    restarts_expected: bool = False  # a new scheduler may come after one is lost: stay and answer 503 meanwhile
    tool_call_parser: str = "auto"  # a file of text/tool_formats; "auto": the model's; "none": calls stay text
    reasoning_parser: str = "auto"  # a file of text/reasoning; "auto", "none": the same
    keep_alive_interval: float = 10.0  # seconds of silence on a stream before a comment is sent
    models: list[ModelConfig] = []  # of several models; the first is loaded at the start. []: there is one
    idle_unload: float = 0.0  # seconds without a request after which the model is unloaded; 0: never
    mcp_config: str = ""  # path of mcp.json; "": no tool servers
    access_log: bool = False
    log_level: str = "info"
    cpus: list[int] = []  # cores to run on; [] keeps the inherited ones
    parent_pid: int = 0  # who must be the parent, checked after PDEATHSIG is set; 0 skips the check
    idle_exit: float = 0.0  # minutes without a request after which the job drains; 0: never
    registry_file: str = ""  # where to write how this server is found (server_registry.py); "": nowhere
    batch_job: str = ""  # the batch system's name for the job, for that file
    end_time: float = 0.0  # when the batch system ends it, Unix time; 0: not known

    def of(self, model: ModelConfig) -> ServerConfig:
        """The configuration for one of several models."""
        fields = {name: getattr(model, name) for name in ModelSettings.__struct_fields__}
        return msgspec.structs.replace(self, served_model_name=model.name, **fields)

    def names(self) -> list[str]:
        """The model's names; the first one is the real one."""
        names = [name.strip() for name in self.served_model_name.split(",") if name.strip()]
        return names or [os.path.basename(os.path.abspath(self.model_dir))]


def take(kind: type[T], variable: str, verb: str) -> T:
    """The configuration from the environment, which is emptied of it: it may hold the API key."""
    text = os.environ.pop(variable, None)
    if text is None:
        raise ValueError(f"{variable} is not set: `phalanx {verb}` starts this process, it is not started by hand")
    return msgspec.json.decode(text, type=kind)
