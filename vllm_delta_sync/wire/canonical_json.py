"""Canonical JSON (UTF-8, sorted keys, no spaces), and reading hostile JSON within a cap.

Does not know any schema.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from vllm_delta_sync.errors import MalformedObject

MAX_BYTES = 1 << 20


def dump(value: object) -> bytes:
    """The canonical bytes of a value of dicts, lists, strings, integers, finite floats, booleans and None."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def parse(data: bytes, what: str, *, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in `data`; raises MalformedObject naming `what` when it is too large or not a JSON object."""
    if len(data) > max_bytes:
        raise MalformedObject(f"{what}: {len(data)} bytes of JSON, at most {max_bytes} are allowed")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedObject(f"{what}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise MalformedObject(f"{what}: the JSON is no object")
    return value
