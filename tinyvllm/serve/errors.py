"""Errors as OpenAI's API writes them: one shape, with the right status."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tinyvllm.api.engine_process import EngineDeadError
from tinyvllm.util import InputError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_MAX_MESSAGE = 1000
_NO_OBJECT = ("missing", "model_attributes_type")  # pydantic's: no body, or another kind of value


class ApiError(Exception):
    """What a caller is told: HTTP status, message, the parameter and a code for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self)[:_MAX_MESSAGE],
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The whole answer."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Response(dump(self.body), self.status, headers, "application/json")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error object, for the API's description."""

    error: ErrorDetail


def dump(value: Any) -> bytes:
    """JSON as UTF-8. Half a surrogate pair, out of a caller's own text, is written as its escape
    (which Python's and JSON's notation have in common)."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace")


def as_api_error(error: Exception) -> ApiError:
    """The error that a caller is told for one that a request met."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return ApiError(400, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(500, f"the engine has ended: {error}", code="engine_dead")
    raise error


async def handle_error(request: Request, error: Exception) -> Response:
    """Answers a request that met an error of a known kind."""
    return as_api_error(error).response()


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Answers what no route takes: an unknown path, a wrong method, a body that cannot be read."""
    assert isinstance(error, HTTPException), error
    message = f"{error.detail}: {request.url.path}"
    if error.status_code == 400:  # not UTF-8, too deep, a number too long: the cause says which
        message = f"the body is not JSON: {error.__cause__}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def handle_invalid(request: Request, error: Exception) -> Response:
    """Answers a body that is not what the endpoint takes: 400, naming the first bad field."""
    assert isinstance(error, RequestValidationError), error
    return as_invalid(error.errors()).response()


async def handle_bug(request: Request, error: Exception) -> Response:
    """Answers a request that met a bug of ours; the log has the traceback."""
    return ApiError(500, "internal error", code="internal_error").response()


def as_invalid(errors: Any) -> ApiError:
    """The error for what pydantic found: all fields, the first one as the parameter."""
    found = []
    first = None
    for entry in errors[:5]:
        path = [str(part) for part in entry["loc"] if part != "body"]
        name = path[0] if path else None
        first = first or name
        if entry["type"] == "json_invalid":
            reason, path, first = f"the body is not JSON: {entry['ctx']['error']}", [], None
        elif not path and entry["type"] in _NO_OBJECT:
            reason = "the body must be a JSON object"
        elif entry["type"] == "extra_forbidden":
            reason = "this field is unknown or not supported"
        else:
            reason = entry["msg"]
        found.append(f"{'.'.join(path)[:200]}: {reason}" if path else reason)
    return ApiError(400, "; ".join(dict.fromkeys(found)), param=first)
