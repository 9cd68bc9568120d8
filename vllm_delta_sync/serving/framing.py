"""The bytes of messages between ranks and controller: JSON with lanes as base64 of little-endian uint32.

Does not move them: `channel` does. Nothing is pickled.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import numpy as np

from vllm_delta_sync.errors import MalformedObject
from vllm_delta_sync.serving import messages as msg
from vllm_delta_sync.serving.messages import Message, Place
from vllm_delta_sync.wire.hop import Hop
from vllm_delta_sync.wire.manifest import LatestPointer, ObjectRef, Wire

_KINDS: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        msg.Tip,
        msg.NothingPublished,
        msg.PollFailed,
        msg.Located,
        msg.Planned,
        msg.LoadBase,
        msg.Prove,
        msg.Locate,
        msg.Joined,
        msg.Plan,
        msg.Stage,
        msg.Drop,
        msg.Audit,
        msg.BaseLoaded,
        msg.Proved,
        msg.Holding,
        msg.Staged,
        msg.Audited,
        msg.WantAudit,
        msg.Failed,
        msg.Lost,
    )
}
_MODELS: dict[str, type[Wire]] = {
    "pointer": LatestPointer, "base": ObjectRef, "ref": ObjectRef, "hop": Hop, "failed": Hop,
}  # fmt: skip


def to_bytes(message: Message) -> bytes:
    """One message as JSON bytes."""
    body = {field.name: _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}
    return json.dumps({"kind": message.kind, **body}, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Message:
    """Parse one message.

    Raises:
        MalformedObject: not JSON, an unknown kind, or fields that do not fit it.
    """
    try:
        body = json.loads(data)
        cls = _KINDS[body.pop("kind")]
        return cls(**{name: _typed(name, value) for name, value in body.items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MalformedObject(f"message between rank and engine cannot be read: {error!r}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return base64.b64encode(np.ascontiguousarray(value, dtype="<u4").tobytes()).decode()
    if isinstance(value, Wire):
        return value.model_dump_json()
    if isinstance(value, Place):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _typed(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("lanes", "effects"):
        return np.frombuffer(base64.b64decode(value), dtype="<u4").reshape(-1, 4).astype(np.uint32)
    if name in _MODELS:
        return _MODELS[name].model_validate_json(value)
    if name in ("place", "held"):
        return Place(**{field: _typed(field, part) for field, part in value.items()})
    if isinstance(value, list):
        return tuple(value)
    return value
