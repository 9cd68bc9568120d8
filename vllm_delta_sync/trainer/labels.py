"""What a trainer says of a version for whoever reads the log, step and metadata, checked before it is written down.

Does not give it any meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.wire import canonical_json
from vllm_delta_sync.wire.manifest import MAX_METADATA_BYTES, MAX_STEP


def checked_step(step: object) -> int | None:
    """The step as an integer. Raises ConfigError."""
    if step is None:
        return None
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # also numpy's integers, but no float
    except TypeError:
        raise ConfigError(f"step is {step!r}, a {type(step).__name__}; it must be an integer") from None
    if abs(number) > MAX_STEP:
        raise ConfigError(f"step is {number}; it must be within ±{MAX_STEP}")
    return number


def checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    """A copy. Raises ConfigError for what is no text, or too much."""
    texts = dict(metadata or {})
    if not all(isinstance(part, str) for item in texts.items() for part in item):
        raise ConfigError("metadata must map strings to strings")
    try:
        size = len(canonical_json.dump(texts))
    except UnicodeEncodeError as error:
        raise ConfigError(f"metadata holds text that UTF-8 cannot write: {error.reason}") from None
    if size > MAX_METADATA_BYTES:
        raise ConfigError(f"metadata is larger than {MAX_METADATA_BYTES} bytes")
    return texts
