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
    503: "service_unavailable_error",
    507: "server_error",
}


class ApiError(Exception):
    """Why a request is not answered. HTTP sends it as its status; the library raises it; a batch job writes it down."""

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


def bad(param: str, message: str) -> ApiError:
    """A field of the request is wrong: `message` says with which value and what is allowed."""
    return ApiError(400, message, param)


class PromptTooLong(ApiError):
    """A prompt of so many tokens, or more, where fewer than `context` are taken."""

    def __init__(self, message: str, param: str, tokens: int, context: int):
        super().__init__(400, message, param, "context_length_exceeded")
        self.tokens = tokens
        self.context = context
