"""Runs one stand-in Hub on loopback: `python -m tests.hub --port 8090 --token secret:write`.

Does not listen on any other address.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from aiohttp import web

from tests.hub.access import Access
from tests.hub.app import Hub


async def _serve(port: int, rights: dict[str, str], page: int, attached: bool, directory: Path) -> None:
    runner = web.AppRunner(Hub(Access(rights)).application(directory, page), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    found = runner.addresses[0][1]
    print(f"http://127.0.0.1:{found}", flush=True)
    if attached:
        await asyncio.to_thread(sys.stdin.read)
    else:
        await asyncio.Event().wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description="A stand-in for the Hugging Face Hub.")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the URL is the first line of output")
    parser.add_argument("--token", action="append", default=[], metavar="TOKEN:read|write", help="may be given again")
    parser.add_argument("--page", type=int, default=1000, help="entries in one page of a listing")
    parser.add_argument("--attached", action="store_true", help="end when standard input ends, as with its parent")
    options = parser.parse_args()
    rights = dict(token.rpartition(":")[::2] for token in options.token)
    with tempfile.TemporaryDirectory(prefix="hub-") as directory:
        try:
            asyncio.run(_serve(options.port, rights, options.page, options.attached, Path(directory)))
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
