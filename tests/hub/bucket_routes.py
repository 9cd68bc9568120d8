"""HTTP routes of buckets: creating and describing, trees, paths, batches, resolving, tokens and the feed of changes.

Does not hold bytes: a bucket maps paths to hashes of the Xet store.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web

from tests.hub.access import READ, WRITE, Access
from tests.hub.cas_routes import bearer
from tests.hub.xet import Cas

PING_S = 2.0


def instant(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Entry:
    """A file of a bucket."""

    hash: str
    size: int
    mtime: float
    uploaded: float

    def described(self, path: str) -> dict[str, Any]:
        times = {"mtime": instant(self.mtime), "uploadedAt": instant(self.uploaded)}
        return {"type": "file", "path": path, "size": self.size, "xetHash": self.hash, **times}


@dataclass
class Bucket:
    """Paths and what they name, and every change so far as (time, change)."""

    private: bool
    created: float = field(default_factory=time.time)
    entries: dict[str, Entry] = field(default_factory=dict)
    changes: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


def refused(status: int, code: str, message: str) -> web.HTTPException:
    kinds = {401: web.HTTPUnauthorized, 403: web.HTTPForbidden, 404: web.HTTPNotFound, 409: web.HTTPConflict}
    headers = {"X-Error-Code": code, "X-Error-Message": message}
    body = json.dumps({"error": message})
    return kinds[status](headers=headers, text=body, content_type="application/json")


class BucketRoutes:
    """Everything below /api/buckets and /buckets.

    Args:
        page: entries in one page of a tree.
    """

    def __init__(self, cas: Cas, access: Access, page: int) -> None:
        self._cas = cas
        self._access = access
        self._page = page
        self._buckets: dict[str, Bucket] = {}

    def add_to(self, app: web.Application) -> None:
        route = app.router.add_route
        api = "/api/buckets/{namespace}/{name}"
        route("POST", api, self._create, name="create")
        route("GET", api, self._describe, name="describe")
        route("DELETE", api, self._remove, name="remove")
        route("GET", api + "/tree", self._tree, name="tree")
        route("GET", api + "/tree/{prefix:.*}", self._tree, name="tree_prefix")
        route("POST", api + "/paths-info", self._paths_info, name="paths_info")
        route("POST", api + "/batch", self._batch, name="batch")
        route("GET", api + "/xet-{right:read|write}-token", self._token, name="token")
        route("GET", api + "/events", self._events, name="events")
        route("HEAD", "/buckets/{namespace}/{name}/resolve/{path:.*}", self._resolve, name="resolve")

    def _identity(self, request: web.Request) -> str:
        return f"{request.match_info['namespace']}/{request.match_info['name']}"

    def _bucket(self, request: web.Request, right: str) -> Bucket:
        """The bucket of a request by someone who may; what one may not see does not exist, as on the Hub."""
        token = bearer(request)
        if token is not None and not self._access.allows(token, READ):
            raise refused(401, "", "Invalid credentials in Authorization header")
        bucket = self._buckets.get(self._identity(request))
        if bucket is None or not self._access.allows(token, READ):
            raise refused(404, "RepoNotFound", "Bucket not found")
        if not self._access.allows(token, right):
            raise refused(403, "", "This token does not have the required permissions")
        return bucket

    async def _create(self, request: web.Request) -> web.Response:
        token, identity = bearer(request), self._identity(request)
        if not self._access.allows(token, READ):
            raise refused(401, "", "Invalid credentials in Authorization header")
        if not self._access.allows(token, WRITE):
            raise refused(403, "", "You do not have the rights to create a bucket here")
        url = f"{request.scheme}://{request.host}/buckets/{identity}"
        if identity in self._buckets:
            return web.json_response({"error": "You already created this bucket", "url": url}, status=409)
        wanted = await request.json() if request.can_read_body else {}
        self._buckets[identity] = Bucket(private=wanted.get("visibility") == "private")
        return web.json_response({"url": url})

    async def _describe(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, READ)
        sizes = [entry.size for entry in bucket.entries.values()]
        updated = bucket.changes[-1][0] if bucket.changes else bucket.created
        described = {"id": self._identity(request), "private": bucket.private, "createdAt": instant(bucket.created)}
        described |= {"size": sum(sizes), "totalFiles": len(sizes), "updatedAt": instant(updated)}
        return web.json_response(described)

    async def _remove(self, request: web.Request) -> web.Response:
        self._bucket(request, WRITE)
        del self._buckets[self._identity(request)]
        return web.Response(status=204)

    async def _tree(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, READ)
        prefix = request.match_info.get("prefix", "")
        rows = {path: entry.described(path) for path, entry in bucket.entries.items() if path.startswith(prefix)}
        if request.query.get("recursive", "").lower() != "true":
            depth = prefix.count("/")
            for path in list(rows):
                folder = "/".join(path.split("/")[: depth + 1])
                if folder != path:
                    rows[folder] = {"type": "directory", "path": folder, "uploadedAt": rows.pop(path)["uploadedAt"]}
        first = request.query.get("cursor", "")
        paths = sorted(path for path in rows if path > first)
        headers = {}
        if len(paths) > self._page:
            query = urlencode({**request.query, "cursor": paths[self._page - 1]})
            headers["Link"] = f'<{request.scheme}://{request.host}{request.rel_url.raw_path}?{query}>; rel="next"'
        return web.json_response([rows[path] for path in paths[: self._page]], headers=headers)

    async def _paths_info(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, READ)
        paths = (await request.json())["paths"]
        if len(paths) > 1000:
            raise web.HTTPBadRequest(text="more than 1000 paths")
        return web.json_response([bucket.entries[path].described(path) for path in paths if path in bucket.entries])

    async def _batch(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, WRITE)
        operations = [json.loads(line) for line in (await request.text()).splitlines()]
        fault = request.get("fault")
        failed: list[dict[str, str]] = []
        lost = 0
        for operation in operations:
            if fault is not None and fault.path in operation["path"]:
                if fault.kind == "lose":
                    failed.append({"path": operation["path"], "error": "Internal error, please try again"})
                lost += 1
            elif (error := self._apply(bucket, operation)) is not None:
                failed.append({"path": operation["path"], "error": error})
        async with bucket.changed:
            bucket.changed.notify_all()
        done = len(operations) - len(failed)
        result = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
        return web.json_response(result, status=422 if failed and not done else 200)

    def _apply(self, bucket: Bucket, operation: dict[str, Any]) -> str | None:
        now, path = time.time(), operation["path"]
        if operation["type"] == "deleteFile":
            if bucket.entries.pop(path, None) is None:
                return "Path not found"
            bucket.changes.append((now, {"path": path, "op": "delete"}))
            return None
        size = self._cas.size(operation["xetHash"])
        if size is None:
            return "No such xet hash"
        kind = "update" if path in bucket.entries else "add"
        mtime = operation["mtime"] / 1e3
        entry = bucket.entries[path] = Entry(operation["xetHash"], size, mtime, now)
        bucket.changes.append((now, {**entry.described(path), "op": kind}))
        return None

    async def _token(self, request: web.Request) -> web.Response:
        right = request.match_info["right"]
        self._bucket(request, right)
        token, expires = self._access.grant(bearer(request) or "", right)
        url = f"{request.scheme}://{request.host}/cas"
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires)}
        return web.json_response({"accessToken": token, "exp": expires, "casUrl": url}, headers=headers)

    async def _resolve(self, request: web.Request) -> web.Response:
        bucket = self._bucket(request, READ)
        entry = bucket.entries.get(request.match_info["path"])
        if entry is None:
            raise refused(404, "EntryNotFound", "Entry not found")
        identity = quote(self._identity(request))
        refresh = f"{request.scheme}://{request.host}/api/buckets/{identity}/xet-read-token"
        headers = {"X-Xet-Hash": entry.hash, "X-Linked-Size": str(entry.size), "ETag": f'"{entry.hash}"'}
        return web.Response(headers={**headers, "Link": f'<{refresh}>; rel="xet-auth"'})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        bucket = self._bucket(request, READ)
        at = len(bucket.changes)
        if "cursor" in request.query:
            at = min(at, int(request.query["cursor"]))
        elif "since" in request.query:
            since = datetime.fromisoformat(request.query["since"]).timestamp()
            at = next((place for place, (when, _) in enumerate(bucket.changes) if when >= since), at)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await stream.prepare(request)
        with suppress(ConnectionResetError):  # whoever listened has gone
            await self._tell(request, stream, bucket, at)
        return stream

    async def _tell(self, request: web.Request, stream: web.StreamResponse, bucket: Bucket, at: int) -> None:
        """Write every change from number `at` on, and signs of life between, for ever."""
        while True:
            new = [change for _, change in bucket.changes[at:]]
            at = len(bucket.changes)
            if new:
                await stream.write(_event("changes", {"cursor": str(at), "changes": new}))
            elif "ready" not in request:
                request["ready"] = True
                await stream.write(_event("ready", {"cursor": str(at)}))
            else:
                await stream.write(b": ping\n\n")
            async with bucket.changed:
                if len(bucket.changes) == at and "ready" in request:
                    try:
                        await asyncio.wait_for(bucket.changed.wait(), PING_S)
                    except TimeoutError:
                        continue


def _event(name: str, data: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
