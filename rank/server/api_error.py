"""The one error that a client sees, in OpenAI's shape."""

from __future__ import annotations

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    409: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable_error",
    507: "server_error",
}

CODES = {  # what each means, for docs/api.md
    "context_length_exceeded": "the prompt, or prompt and answer together, do not fit into the model's context",
    "text_limits": "the prompt takes the model's chat template or tokenizer, or the answer's grammar takes its check, "
    "too much processor time or memory; send less, use a simpler grammar or another model",
    "in_use": "a batch still reads the file",
    "batch_over": "the batch has ended",
    "batch_not_over": "the batch has not ended yet",
    "no_results": "the batch has no results, or none yet",
    "invalid_api_key": "the API key is missing or wrong",
    "host_not_allowed": "the request's Host is no name of this server (`--allowed-hosts`)",
    "origin_not_allowed": "a page of this origin may not ask (`--allowed-origins`)",
    "not_found": "there is no such path, or nothing of that id",
    "model_not_found": "no model has this name",
    "conversation_not_found": "this conversation is not kept, or no longer",
    "item_not_found": "this conversation has no such item",
    "conversations_off": "the server keeps no conversations (`--conversation-store 0`)",
    "response_not_found": "this response is not kept, or no longer",
    "file_not_found": "there is no such file",
    "batch_not_found": "there is no such batch",
    "files_off": "the server keeps no files (`--file-store`)",
    "page_off": "the server has no web page (`--ui-server`)",
    "method_not_allowed": "the path does not take this method",
    "conversation_busy": "another chat of this conversation is being answered",
    "too_large": "the body, a file or a text is larger than allowed",
    "rate_limit_exceeded": "the API key has as many requests open as it may (`--requests-per-key`); wait for one",
    "queue_full": "as many requests or batches wait as may; try again later",
    "busy": "open requests hold all the memory, connections or places that they may; try again later",
    "files_full": "the files have no room; delete some",
    "store_full": "the response is larger than what is kept for an API key",
    "files_busy": "another job of the service has the files for the moment; send the request again",
    "file_damaged": "a stored file is not what was stored",
    "internal_error": "a fault of the server, which its log tells of",
    "loading": "the model is being loaded; try again",
    "sleeping": "the model sleeps until somebody asks for `/wake_up`",
    "admin_off": "key holders may not do this (`--admin`)",
    "unloaded": "no model is loaded at the moment; try again",
    "model_load_failed": "the model that was asked for cannot be loaded",
    "draining": "the server is shutting down",
    "restarting": "the job has ended and is being restarted; try again",
    "failed": "the job has ended",
    "no_job": "a gateway's: no job has become ready in time; try again",
    "job_lost": "a gateway's: the job that was answering has ended; send the request again",
}


NOT_TAKEN = "X-Not-Taken"  # the header of an answer that says so: nothing of the request was begun


class ApiError(Exception):
    """Why a request is not answered. HTTP sends it as its status; the library raises it; a batch job writes it down."""

    taken = True  # False: nothing of the request was begun, so it can be sent again to another job

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds

    def body(self) -> dict:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def not_taken(self) -> ApiError:
        """The error for a request of which nothing was begun."""
        self.taken = False
        return self


def bad(param: str, message: str) -> ApiError:
    """A field of the request is wrong: `message` names the value and what is allowed."""
    return ApiError(400, message, param)


class PromptTooLong(ApiError):
    """A prompt of so many tokens, or more, where fewer than `context` are taken."""

    def __init__(self, message: str, param: str, tokens: int, context: int):
        super().__init__(400, message, param, "context_length_exceeded")
        self.tokens = tokens
        self.context = context
