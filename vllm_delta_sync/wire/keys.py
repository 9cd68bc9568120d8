"""The rule for keys: what may name an object, as the log states it and every store enforces it again.

Does not know which objects exist.
"""

from __future__ import annotations

import re

_KEY = re.compile(r"[A-Za-z0-9._/-]{1,512}")


def check_key(key: str) -> str:
    """Return a key that is relative, of allowed characters and plain segments; ValueError for any other."""
    if not _KEY.fullmatch(key) or any(segment in ("", ".", "..") for segment in key.split("/")):
        raise ValueError(f"{key[:80]!r} is not a relative key of segments of A-Z a-z 0-9 . _ -")
    return key
