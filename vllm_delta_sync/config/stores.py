"""Which stores there are, what can be set for each, and how a URI names one.

Does not open a store, and holds no secret: credentials come from the environment or from files that it names.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field

from vllm_delta_sync.config.base import Settings


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError("must be absolute: servers and their workers have other working directories")
    return path


def _prefix(prefix: str) -> str:
    segments = prefix.split("/")
    if "" in segments or "." in segments or ".." in segments:
        raise ValueError("must be segments joined by single slashes, none of them '.' or '..'")
    return prefix


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://host[:port] or https://host[:port]")
    if parts.username or parts.password or parts.query:
        raise ValueError("must not carry credentials: give them in the environment")
    return url.rstrip("/")


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Prefix = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/-]{1,256}$"), AfterValidator(_prefix)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]


class FileStoreConfig(Settings):
    """A directory on this host, or on a file system that trainer and servers share."""

    kind: Literal["file"] = "file"
    """Which store this is."""

    path: AbsolutePath
    """Absolute path of the bucket's root directory; need not exist yet."""

    @property
    def uri(self) -> str:
        """The same store as one string, `file:///…`, percent-encoded."""
        return Path(self.path).as_uri()


class HfStoreConfig(Settings):
    """A Hugging Face bucket. The token is the one of `hf auth login`, or HF_TOKEN."""

    kind: Literal["hf"] = "hf"
    """Which store this is."""

    bucket: str = Field(pattern=r"^[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}$")
    """The bucket's id, `namespace/name`."""

    prefix: Prefix | None = None
    """Where in the bucket the log is; null: at its root."""

    endpoint_url: Endpoint | None = None
    """Another Hub than the one of HF_ENDPOINT, or of huggingface.co."""

    @property
    def uri(self) -> str:
        """The same store as one string, `hf://buckets/namespace/name[/prefix]`."""
        return _uri("hf://buckets", self.bucket, self.prefix)


class S3StoreConfig(Settings):
    """An S3 bucket, of AWS or of any server that speaks S3. Credentials: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
    AWS_SESSION_TOKEN, a web identity, or the role of the machine."""

    kind: Literal["s3"] = "s3"
    """Which store this is."""

    bucket: str = Field(pattern=r"^[A-Za-z0-9._-]{3,63}$")
    """The bucket's name."""

    prefix: Prefix | None = None
    """Where in the bucket the log is; null: at its root."""

    endpoint_url: Endpoint | None = None
    """The server, for another one than AWS; null: AWS_ENDPOINT_URL, or AWS."""

    region: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,64}$")
    """The bucket's region; null: AWS_REGION, or us-east-1."""

    anonymous: bool = False
    """Whether requests go out unsigned, for a public bucket that is only read."""

    conditional_writes: bool = True
    """Whether the server honours If-Match and If-None-Match; false where it does not: then a second publisher is
    found out, not kept out."""

    @property
    def uri(self) -> str:
        """The same place as one string, `s3://bucket[/prefix]`, without the other settings."""
        return _uri("s3:/", self.bucket, self.prefix)


class GsStoreConfig(Settings):
    """A Google Cloud Storage bucket. Credentials: GOOGLE_APPLICATION_CREDENTIALS, or the machine's own account."""

    kind: Literal["gs"] = "gs"
    """Which store this is."""

    bucket: str = Field(pattern=r"^[a-z0-9._-]{3,222}$")
    """The bucket's name."""

    prefix: Prefix | None = None
    """Where in the bucket the log is; null: at its root."""

    anonymous: bool = False
    """Whether requests go out unsigned, for a public bucket that is only read."""

    @property
    def uri(self) -> str:
        """The same place as one string, `gs://bucket[/prefix]`."""
        return _uri("gs:/", self.bucket, self.prefix)


class AzStoreConfig(Settings):
    """An Azure Blob Storage container. Credentials: AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_KEY, a client
    secret or workload identity in AZURE_*, or the machine's managed identity."""

    kind: Literal["az"] = "az"
    """Which store this is."""

    container: str = Field(pattern=r"^[a-z0-9-]{3,63}$")
    """The container's name."""

    prefix: Prefix | None = None
    """Where in the container the log is; null: at its root."""

    account: str | None = Field(default=None, pattern=r"^[a-z0-9]{3,24}$")
    """The storage account; null: AZURE_STORAGE_ACCOUNT_NAME."""

    endpoint_url: Endpoint | None = None
    """The server, for another one than Azure's of that account."""

    anonymous: bool = False
    """Whether requests go out unsigned, for a public container that is only read."""

    @property
    def uri(self) -> str:
        """The same place as one string, `az://container[/prefix]`, without the other settings."""
        return _uri("az:/", self.container, self.prefix)


class MemoryStoreConfig(Settings):
    """Objects in the memory of this process, by name: for tests and trials, never for a server."""

    kind: Literal["memory"] = "memory"
    """Which store this is."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,96}$")
    """Which of the process's stores; the same name is the same objects."""

    prefix: Prefix | None = None
    """Where in the store the log is; null: at its root."""

    @property
    def uri(self) -> str:
        """The same store as one string, `memory://name[/prefix]`."""
        return _uri("memory:/", self.name, self.prefix)


SharedStoreConfig = FileStoreConfig | HfStoreConfig | S3StoreConfig | GsStoreConfig | AzStoreConfig
StoreConfig = SharedStoreConfig | MemoryStoreConfig

MODELS: dict[str, type[StoreConfig]] = {
    "file": FileStoreConfig,
    "hf": HfStoreConfig,
    "s3": S3StoreConfig,
    "gs": GsStoreConfig,
    "az": AzStoreConfig,
    "memory": MemoryStoreConfig,
}
"""Scheme of a URI, which is also the `kind` of a mapping, to the model of its settings."""

EXAMPLES = {
    "file": "file:///path/to/bucket",
    "hf": "hf://buckets/namespace/name[/prefix]",
    "s3": "s3://bucket[/prefix]",
    "gs": "gs://bucket[/prefix]",
    "az": "az://container[/prefix]",
    "memory": "memory://name[/prefix]",
}
"""What a URI of each scheme looks like."""


def settings_of_uri(uri: str) -> dict[str, str]:
    """The mapping that says the same as a URI or a plain path; whether its values are right is for the model to say.

    Raises ValueError, with what a URI must look like, for an unknown scheme or a URI that names no store.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return {"kind": "file", "path": uri}
    if scheme not in MODELS:
        close = difflib.get_close_matches(scheme, MODELS, n=1, cutoff=0.5)
        raise ValueError(
            f"the store's URI has the scheme {scheme!r}{f', did you mean {close[0]!r}?' if close else ','} and the "
            f"stores that exist are: {', '.join(EXAMPLES.values())}, or a plain path"
        )
    if scheme == "file":
        return {"kind": "file", "path": file_path(uri)}
    if "?" in rest or "#" in rest or "@" in rest:
        raise ValueError(f"store URI of {scheme}: it takes no query and no credentials; write {EXAMPLES[scheme]}")
    return _placed(scheme, rest.rstrip("/").split("/"), uri)


def file_path(uri: str) -> str:
    """The path that a file URI (percent-decoded; `#` and `?` are letters like others) or a plain path names.

    For trainer and servers alike, so that one URI is one directory. Raises ValueError when a file URI names a host.
    """
    _, separator, rest = uri.partition("://")
    if not separator:
        return uri
    rest = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not rest.startswith("/"):
        raise ValueError(f"store {uri!r} names a host: a file URI has three slashes, file:///{rest}")
    return unquote(rest)


def _placed(scheme: str, parts: list[str], uri: str) -> dict[str, str]:
    """The settings of a store whose URI is a place and a prefix in it."""
    if scheme == "hf":
        if parts[0] != "buckets" or len(parts) < 3:
            raise ValueError(f"store {uri!r} names no bucket of the Hub: write {EXAMPLES[scheme]}")
        parts = ["/".join(parts[1:3]), *parts[3:]]
    if not parts[0]:
        raise ValueError(f"store {uri!r} names no place: write {EXAMPLES[scheme]}")
    place = {"az": "container", "memory": "name"}.get(scheme, "bucket")
    prefix = {"prefix": "/".join(parts[1:])} if len(parts) > 1 else {}
    return {"kind": scheme, place: parts[0], **prefix}


def _uri(start: str, place: str, prefix: str | None) -> str:
    return "/".join(part for part in (start, place, prefix) if part)
