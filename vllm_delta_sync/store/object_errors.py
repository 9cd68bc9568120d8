"""What obstore raises, as this project's typed errors.

Does not decide whether a call is tried again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore import exceptions

from vllm_delta_sync.errors import (
    AlreadyExists,
    ConfigError,
    DeltaSyncError,
    NotFound,
    PreconditionFailed,
    RateLimited,
    StoreError,
    Unauthorized,
    Unavailable,
)


class PastEnd(StoreError):
    """A range begins at or after the end of its object, or the server says so."""


PATIENCE_S = 10.0
"""Seconds to wait after a refusal for rate: obstore has tried again by then, and does not tell Retry-After."""

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_PAST_END = re.compile(r"Invalid range: Wanted range starting at")
_QUERY = re.compile(r"\?\S*")
# Without credentials the clients ask the machine's own services for some, and those are what then fails.
_CREDENTIALS = re.compile(
    r"169\.254\.|/latest/(api|meta-data)|computeMetadata|/metadata/identity|token request|credential"
)
_REJECTED = re.compile(
    r"<Code>(ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|AuthenticationFailed)<"
)


@contextmanager
def typed(where: str) -> Iterator[None]:
    """Raise the store's typed error for whatever obstore raises inside; `where` begins its message."""
    try:
        yield
    except FileNotFoundError as error:
        hint = "the bucket does not exist" if "NoSuchBucket" in str(error) else "does not exist"
        raise NotFound(f"{where}: {hint}") from None
    except exceptions.AlreadyExistsError:
        raise AlreadyExists(f"{where} already exists") from None
    except exceptions.PreconditionError:
        raise PreconditionFailed(
            f"{where} is not the object with that tag any more; read it again before writing it"
        ) from None
    except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as error:
        raise _unauthorized(where, error) from error
    except exceptions.BaseError as error:
        raise of_generic(where, error) from error


def of_generic(where: str, error: Exception) -> DeltaSyncError:
    """The typed error for one that obstore names no kind of, by the status code or the words in its message."""
    text = _brief(error)
    found = _STATUS.search(text)
    status = int(found.group(1)) if found else None
    if _CREDENTIALS.search(text) or status in (401, 403) or _REJECTED.search(text):
        return _unauthorized(where, error)
    if status == 416 or _PAST_END.search(text):
        return PastEnd(f"{where}: {text}")
    if status in (429, 503):
        return RateLimited(f"{where}: the store asks to slow down: {text}", PATIENCE_S)
    if status is not None and status < 500:
        return StoreError(f"{where}: the store refuses the request: {text}")
    if "configured region" in text:
        return ConfigError(f"{where}: the bucket is in another region; set `region` or AWS_REGION")
    if "invalid path" in text:
        return StoreError(
            f"{where}: holds an object that is none of a log's and cannot even be listed; remove it: {text}"
        )
    return Unavailable(f"{where}: the store cannot be reached, or failed for now: {text}")


def _unauthorized(where: str, error: Exception) -> Unauthorized:
    text = _brief(error)
    if "RequestTimeTooSkewed" in text:
        return Unauthorized(f"{where}: this machine's clock is too wrong to sign requests by; set it: {text}")
    return Unauthorized(
        f"{where}: no credentials, none with the right to do this, or a clock that is minutes wrong; "
        f"docs/operations.md names the variables that hold credentials: {text}"
    )


def _brief(error: Exception) -> str:
    """The message without obstore's debugging text and without queries, which may be signed."""
    return _QUERY.sub("?…", str(error).split("\n\nDebug source", 1)[0])[:500]
