"""Opening a store by URI: a closed table from scheme to the module that implements it.

Does not import a store before one of its URIs is opened.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from vllm_delta_sync.errors import ConfigError
from vllm_delta_sync.store.protocol import Store

# scheme → module with a function open_uri(uri) -> Store
_SCHEMES = {"file": "vllm_delta_sync.store.local"}


def open_store(uri: str) -> Store:
    """The store at a URI, or at a plain path of this machine; nothing is created before the first write.

    Raises ConfigError for an unknown scheme or a URI that its store cannot mean.
    """
    scheme, separator, _ = uri.partition("://")
    if not separator:
        scheme = "file"
    if not uri or scheme not in _SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(_SCHEMES))
        raise ConfigError(f"cannot open the store {uri!r}: use a path, or one of the schemes {known}")
    return cast(Store, import_module(_SCHEMES[scheme]).open_uri(uri))
