"""The router's ASGI application."""

from __future__ import annotations

import asyncio
import json

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.router.addresses import Role
from kvferry.router.calls import CallFailedError
from kvferry.router.connection import Head, Outgoing
from kvferry.router.exchange import CHAT_PATH, Exchange
from kvferry.router.front import Front
from kvferry.router.headers import answer_headers, clean_request_id, engine_headers
from kvferry.router.registry import Engine
from kvferry.router.replies import error_body

__all__ = ["make_app"]

_MODELS_S = 10.0
_COMPLETION_PATHS = ("/v1/completions", CHAT_PATH)


class _Completions:
    """An endpoint, in ASGI's terms: it has to see the client leave, and to write as bytes come."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self._front, scope, receive, send).run()


class _Pages:
    """The endpoints beside completions."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def health(self, request: Request) -> Response:
        """Healthy is a router that can have requests answered."""
        counts = self._front.engines.counts()
        reasons = [] if counts["decode"] else ["no decode engine is up"]
        warnings = [] if counts["prefill"] else ["no prefill engine is up: decode engines compute prompts themselves"]
        page = {"healthy": not reasons, "reasons": reasons, "warnings": warnings, "engines": counts}
        return Response(json.dumps(page) + "\n", 503 if reasons else 200, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(self._front.measures.as_text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        """What the first engine says that answers: all of them serve the same model."""
        engines = [*self._front.engines.up(Role.DECODE), *self._front.engines.up(Role.PREFILL)]
        for engine in engines:
            try:
                head, body = await asyncio.wait_for(self._ask_models(request, engine), _MODELS_S)
            except (CallFailedError, asyncio.TimeoutError):
                continue
            response = Response(body, head.status)
            response.raw_headers += answer_headers(head.headers)
            return response
        return _error(503, "there is no engine at present that answers", "no_engine")

    async def _ask_models(self, request: Request, engine: Engine) -> tuple[Head, bytes]:
        given = list(request.scope["headers"])
        headers = engine_headers(given, engine.address, clean_request_id(given))
        with self._front.calls.call(engine.address, Outgoing("GET", "/v1/models", headers)) as call:
            return await call.head(), await call.body()


def make_app(front: Front) -> Starlette:
    """For uvicorn, in the event loop in which `front` was made."""
    pages, completions = _Pages(front), _Completions(front)
    return Starlette(
        routes=[
            *(Route(path, completions, methods=["POST"]) for path in _COMPLETION_PATHS),
            Route("/v1/models", pages.models),
            Route("/health", pages.health),
            Route("/metrics", pages.metrics),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _our_error},
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return _error(error.status_code, text, "no_such_page" if error.status_code == 404 else "invalid_request")


async def _our_error(request: Request, error: Exception) -> Response:
    """The trace is logged by the server."""
    return _error(500, "the router failed; its log says how", "router_failed")


def _error(status: int, text: str, code: str) -> Response:
    return Response(error_body(status, text, code=code), status, media_type="application/json")
