"""HTTP routes of the Xet store: uploads of xorbs and shards, reconstructions, and ranges of xorbs.

Does not know of buckets: a token says which.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from tests.hub.access import READ, WRITE, Access
from tests.hub.xet import BadUpload, Cas, OutOfRange

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


def bearer(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def asked_range(request: web.Request) -> tuple[int, int | None]:
    """Start and end (exclusive) of the Range header; the whole when there is none."""
    found = _RANGE.fullmatch(request.headers.get("Range", "bytes=0-"))
    if found is None:
        raise web.HTTPRequestRangeNotSatisfiable
    return int(found[1]), int(found[2]) + 1 if found[2] else None


class CasRoutes:
    """The routes below /cas, which is the URL that tokens name."""

    def __init__(self, cas: Cas, access: Access) -> None:
        self._cas = cas
        self._access = access

    def add_to(self, app: web.Application) -> None:
        route = app.router.add_route
        route("POST", "/cas/v1/xorbs/default/{hash}", self._put_xorb, name="put_xorb")
        route("POST", "/cas/v1/shards", self._put_shard, name="put_shard")
        route("GET", "/cas/v2/reconstructions/{hash}", self._reconstruct, name="reconstruction")
        route("GET", "/cas/xorb/{hash}", self._fetch, name="fetch")
        # What the client tries first and can do without: deduplication by others' chunks, grants, shards of version 2.
        route("*", "/cas/{rest:.*}", self._absent, name="cas_other")

    def _check(self, request: web.Request, right: str) -> None:
        if not self._access.xet_allows(bearer(request), right):
            raise web.HTTPUnauthorized(text="the token is unknown, expired or lacks the right")

    async def _put_xorb(self, request: web.Request) -> web.Response:
        self._check(request, WRITE)
        try:
            new = self._cas.add_xorb(request.match_info["hash"], await request.read())
        except BadUpload as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.json_response({"was_inserted": new})

    async def _put_shard(self, request: web.Request) -> web.Response:
        self._check(request, WRITE)
        try:
            self._cas.add_shard(await request.read())
        except BadUpload as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.json_response({"result": 1})

    async def _reconstruct(self, request: web.Request) -> web.Response:
        self._check(request, READ)
        start, end = asked_range(request)
        fetch_url = f"{request.scheme}://{request.host}/cas/xorb/"
        try:
            found = self._cas.reconstruction(request.match_info["hash"], start, end, fetch_url)
        except KeyError:
            raise web.HTTPNotFound(text="no file of that hash") from None
        except OutOfRange:
            raise web.HTTPRequestRangeNotSatisfiable from None
        return web.json_response(found)

    async def _fetch(self, request: web.Request) -> web.Response:
        start, end = asked_range(request)
        if end is None:
            raise web.HTTPBadRequest(text="a range is needed")
        body = self._cas.read(request.match_info["hash"], start, end)
        return web.Response(status=206, body=body, content_type="application/octet-stream")

    async def _absent(self, request: web.Request) -> web.Response:
        self._check(request, READ)
        raise web.HTTPNotFound
