"""The HTTP application: which path does what."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import tinyvllm
from tinyvllm.serve import errors
from tinyvllm.serve.chat import chat, render
from tinyvllm.serve.completions import complete
from tinyvllm.serve.connection import KNOWN_ERRORS, CallerLeftError
from tinyvllm.serve.dashboard import add_dashboard
from tinyvllm.serve.guard import Guard
from tinyvllm.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tinyvllm.serve.state import ServerState
from tinyvllm.util import InputError

_ERROR_STATUSES = (400, 401, 404, 408, 413, 429, 500, 503, 504)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": errors.ErrorBody} for status in _ERROR_STATUSES
}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}}
}


def create_app(state: ServerState) -> ASGIApp:
    """The application behind its guard."""
    app = create_routes(state)
    if state.config.dashboard:
        add_dashboard(app, state)
    return Guard(app, state)


def create_routes(state: ServerState) -> FastAPI:
    """The endpoints."""
    app = FastAPI(
        title="tinyvllm",
        version=tinyvllm.__version__,
        description="OpenAI's API for a model served by tinyvllm",
        redirect_slashes=False,
    )
    for kind in KNOWN_ERRORS:
        app.add_exception_handler(kind, errors.handle_error)
    app.add_exception_handler(RequestValidationError, errors.handle_invalid)
    app.add_exception_handler(HTTPException, errors.handle_http_error)
    app.add_exception_handler(CallerLeftError, _answer_nobody)
    app.add_exception_handler(Exception, errors.handle_bug)
    _add_generation(app, state)
    _add_tokens(app, state)
    _add_information(app, state)
    return app


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", responses={**_ERRORS, **_STREAMS}, response_class=Response)
    async def completions(body: Annotated[CompletionRequest, Body()], request: Request) -> Response:
        return await complete(state, body, request)

    @app.post("/v1/chat/completions", responses={**_ERRORS, **_STREAMS}, response_class=Response)
    async def chat_completions(
        body: Annotated[ChatCompletionRequest, Body()], request: Request
    ) -> Response:
        return await chat(state, body, request)


def _add_tokens(app: FastAPI, state: ServerState) -> None:
    @app.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: Annotated[TokenizeRequest, Body()]) -> Response:
        state.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InputError("give either prompt or messages")
        tokenizer = state.tokenizer
        if body.messages is not None:
            ids = await render(
                state, body.messages, body.add_generation_prompt, body.chat_template_kwargs
            )
        else:
            special = body.add_special_tokens is not False
            ids = await asyncio.to_thread(tokenizer.encode, body.prompt or "", special)
        texts = None
        if body.return_token_strs:
            # Each id once: a prompt has many tokens, of a vocabulary that has an end.
            known = await asyncio.to_thread(
                lambda: {i: tokenizer.decode([i], False) for i in set(ids)}
            )
            texts = [known[i] for i in ids]
        return _json(
            {
                "count": len(ids),
                "max_model_len": state.max_model_len,
                "tokens": ids,
                "token_strs": texts,
            }
        )

    @app.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: Annotated[DetokenizeRequest, Body()]) -> Response:
        state.check_model(body.model)
        vocab_size = state.model.config.vocab_size
        if body.tokens and max(body.tokens) >= vocab_size:
            raise InputError(f"tokens: ids are from 0 to {vocab_size - 1}, not {max(body.tokens)}")
        if len(body.tokens) > state.max_model_len:
            raise InputError(f"tokens: {len(body.tokens)} ids; at most {state.max_model_len}")
        text = await asyncio.to_thread(state.tokenizer.decode, body.tokens, False)
        return _json({"prompt": text})


def _add_information(app: FastAPI, state: ServerState) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": state.created,
            "owned_by": "tinyvllm",
            "root": state.llm.config.model,
            "parent": None,
            "max_model_len": state.max_model_len,
        }

    @app.get("/v1/models", responses=_ERRORS)
    async def models() -> Response:
        return _json({"object": "list", "data": [card(name) for name in state.names]})

    @app.get("/v1/models/{model:path}", responses=_ERRORS)
    async def model(model: str) -> Response:
        return _json(card(state.check_model(model)))

    @app.get("/health", responses=_ERRORS, response_class=Response)
    async def health() -> Response:
        state.check_serving()
        return Response()

    @app.get("/version", responses=_ERRORS)
    async def version() -> Response:
        return _json({"version": tinyvllm.__version__})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        text = state.metrics.exposition(await state.llm.get_stats())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _json(value: Any) -> Response:
    return Response(errors.dump(value), media_type=JSONResponse.media_type)
