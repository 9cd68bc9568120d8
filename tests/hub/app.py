"""The stand-in as one web application: routes, what is counted and limited, what fails on purpose, and the controls.

Does not listen by itself; `python -m tests.hub` does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.hub.access import Access, Meter, Quota
from tests.hub.bucket_routes import BucketRoutes
from tests.hub.cas_routes import CasRoutes, Handler
from tests.hub.faults import Fault, spoiled
from tests.hub.xet import Cas

_LARGEST_UPLOAD = 1 << 30
_FOR_EVER_S = 3600.0


def class_of(path: str) -> str:
    """What a request's quota is called: `api`, `resolver`, or `cas`, which has none on the Hub."""
    if path.startswith("/cas/"):
        return "cas"
    return "api" if path.startswith("/api/") else "resolver"


@dataclass
class Hub:
    """All state of one stand-in."""

    access: Access
    meter: Meter = field(default_factory=Meter)
    faults: list[Fault] = field(default_factory=list)

    def application(self, directory: Path, page: int) -> web.Application:
        """The application; xorbs are kept in `directory`, and a page of a tree has at most `page` entries."""
        app = web.Application(client_max_size=_LARGEST_UPLOAD, middlewares=[self._around])
        cas = Cas(directory)
        CasRoutes(cas, self.access).add_to(app)
        BucketRoutes(cas, self.access, page).add_to(app)
        app.router.add_post("/control", self._control, name="control")
        return app

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        route = request.match_info.route.name or "unknown"
        if route == "control":
            return await handler(request)
        kind = class_of(request.path)
        self.meter.counts.update((kind, route))
        headers, left = self._limits(kind)
        if not left:
            return web.json_response({"error": "Too many requests"}, status=429, headers=headers)
        fault = next((one for one in self.faults if one.befalls(route, kind, request.method, request.path)), None)
        if fault is not None:
            request["fault"] = fault
            if fault.kind == "status":
                return web.Response(status=fault.status, headers={**headers, **fault.headers})
            if fault.kind == "stall":
                await asyncio.sleep(_FOR_EVER_S)
        try:
            response = await handler(request)
        except web.HTTPException as refusal:
            refusal.headers.update(headers)
            raise
        if isinstance(response, web.Response):
            response.headers.update(headers)
            if fault is not None and isinstance(response.body, bytes):
                return await _spoil(request, response, fault)
        return response

    def _limits(self, kind: str) -> tuple[dict[str, str], bool]:
        """Headers that tell of the quota of a class, and whether this request is within it."""
        quota = self.meter.quotas.get(kind)
        if quota is None:
            return {}, True
        allowed, left, reset = quota.take()
        policy = f'"fixed window";"{kind}";q={quota.limit};w={quota.window_s:.0f}'
        return {"RateLimit": f'"{kind}";r={left};t={reset}', "RateLimit-Policy": policy}, allowed

    async def _control(self, request: web.Request) -> web.Response:
        """Change what the body names, in this order, then answer with the counts."""
        wanted: dict[str, Any] = await request.json()
        if "rights" in wanted:
            self.access.rights.update(wanted["rights"])
        if "xet_token_life_s" in wanted:
            self.access.xet_token_life_s = wanted["xet_token_life_s"]
        if wanted.get("end_xet_tokens"):
            self.access.end_xet_tokens()
        if "quotas" in wanted:
            self.meter.quotas = {kind: Quota(*limits) for kind, limits in wanted["quotas"].items()}
        if "faults" in wanted:
            self.faults = [Fault.parse(fault) for fault in wanted["faults"]]
        if wanted.get("forget_counts"):
            self.meter.counts.clear()
        return web.json_response(dict(self.meter.counts))


async def _spoil(request: web.Request, response: web.Response, fault: Fault) -> web.StreamResponse:
    body = response.body
    assert isinstance(body, bytes)
    if fault.kind not in ("truncate", "stall_body"):
        response.body = spoiled(fault.kind, body)
        return response
    half = web.StreamResponse(status=response.status, headers=response.headers)
    half.content_length = len(body)
    await half.prepare(request)
    await half.write(body[: len(body) // 2])
    if fault.kind == "stall_body":
        await asyncio.sleep(_FOR_EVER_S)
    if request.transport is not None:
        request.transport.close()
    return half
