"""What an operator can set on a server, as one frozen model, and where it is read from.

Does not open the store, import torch or vLLM, or know what vLLM itself is set to.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import unquote

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from vllm_delta_sync.errors import ConfigError

CONFIG_ENV = "VLLM_DELTA_SYNC_CONFIG"
SECTION = "delta_sync"

_EXAMPLE = f"""\
write, in the YAML that `vllm serve MODEL --config` reads:

  additional-config:
    {SECTION}:
      store: file:///path/to/bucket

or name a YAML file of those settings in the environment variable {CONFIG_ENV}"""


class _Settings(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class FileStoreConfig(_Settings):
    """A directory on this host, or on a file system that trainer and servers share."""

    kind: Literal["file"] = "file"
    """Which store this is."""

    path: str
    """Absolute path of the bucket's root directory; need not exist yet."""

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/"):
            raise ValueError("must be absolute: servers and their workers have other working directories")
        return path

    @property
    def uri(self) -> str:
        """The same store as one string, `file:///…`, percent-encoded."""
        return Path(self.path).as_uri()


class DeltaSyncConfig(_Settings):
    """Every setting of the server side, with its default."""

    store: FileStoreConfig
    """The bucket to follow: a URI such as `file:///mnt/bucket`, an absolute path, or a mapping with its `kind`."""

    run: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    """Follow this run (32 hex digits) whatever the bucket's RUN says; null follows RUN."""

    poll_interval_s: float = Field(default=5.0, ge=0.05)
    """Seconds between two looks at LATEST."""

    start: Literal["catch_up", "serve_base"] = "catch_up"
    """`catch_up` takes no request before the version that is latest at start is served; `serve_base` starts at once."""

    catch_up_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that `catch_up` may take before the start fails."""

    kv_cache: Literal["keep", "reset_prefix", "recompute"] = "reset_prefix"
    """After a commit: `keep` every block, let no *later* request reuse an old block (`reset_prefix`), or also
    `recompute` the requests that are running."""

    kernel: Literal["auto", "native", "reference"] = "auto"
    """`native` refuses to start without the compiled library, `reference` never uses it, `auto` takes what there is."""

    threads: int = Field(default=1, ge=1, le=256)
    """CPU threads that write one commit, per rank; a GPU needs none."""

    unmapped: Literal["refuse", "ignore"] = "refuse"
    """What to do about published tensors that the serving model never loads."""

    on_error: Literal["keep_serving", "stop"] = "keep_serving"
    """Whether a server that cannot follow keeps serving its last good version or stops."""

    audit_every: int = Field(default=0, ge=0)
    """Versions between two full passes over the live weights; 0 audits on demand only."""

    commit_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for all ranks to answer a commit before the engine is taken for poisoned."""

    @model_validator(mode="before")
    @classmethod
    def _store_from_uri(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("store"), str):
            return {**data, "store": _parse_store_uri(data["store"])}
        return data


def _parse_store_uri(uri: str) -> dict[str, str]:
    scheme, separator, _ = uri.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"store {uri!r} has the scheme {scheme!r}, and the stores that exist are: file://")
    return {"kind": "file", "path": file_path(uri)}


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


def parse(settings: object, where: str) -> DeltaSyncConfig:
    """Validate one mapping of settings.

    Args:
        settings: what YAML or JSON gave, keys as in `DeltaSyncConfig`.
        where: what to call its source in an error, such as a file name.

    Raises:
        ConfigError: naming each wrong key, its value, why it is wrong and what was probably meant.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, got {settings!r}; {_EXAMPLE}")
    try:
        return DeltaSyncConfig.model_validate(dict(settings))
    except ValidationError as error:
        reasons = "; ".join(_explain(detail) for detail in error.errors())
        raise ConfigError(f"{where}: {reasons}") from None


def load(additional_config: object, environ: Mapping[str, str] = os.environ) -> DeltaSyncConfig:
    """The server's settings, from vLLM's `additional_config["delta_sync"]` or the file named by VLLM_DELTA_SYNC_CONFIG.

    Args:
        additional_config: `vllm_config.additional_config`; anything but a mapping counts as empty.
        environ: the process environment.

    Raises:
        ConfigError: both or neither are given, the file cannot be read, or a setting is wrong.
    """
    inline = additional_config.get(SECTION) if isinstance(additional_config, Mapping) else None
    file = environ.get(CONFIG_ENV)
    if inline is not None and file:
        raise ConfigError(
            f"the settings are given twice, in additional_config[{SECTION!r}] and in {CONFIG_ENV}={file}: remove one"
        )
    if inline is not None:
        return parse(inline, f"additional_config[{SECTION!r}]")
    if file:
        return load_file(Path(file))
    raise ConfigError(f"there are no settings for delta sync: {_EXAMPLE}")


def load_file(path: Path) -> DeltaSyncConfig:
    """Read a YAML file of settings, with or without the top key `delta_sync`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a setting is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if isinstance(content, Mapping) and set(content) == {SECTION}:
        content = content[SECTION]
    return parse(content, str(path))


def _explain(detail: ErrorDetails) -> str:
    """One pydantic complaint as a sentence: key, value, why, and the nearest valid thing."""
    location = [str(part) for part in detail["loc"]]
    key, value = ".".join(location), detail["input"]
    if detail["type"] == "extra_forbidden":
        valid = sorted(_model_at(location[:-1]).model_fields)
        return f"unknown key {key!r} (value {value!r}){_nearest(location[-1], valid)}; the keys are {', '.join(valid)}"
    if detail["type"] == "missing":
        hint = ": the bucket to follow, for example file:///path/to/bucket" if key == "store" else ""
        return f"the key {key!r} is missing{hint}"
    if detail["type"] == "literal_error":
        valid = list(_choices(_model_at(location[:-1]).model_fields[location[-1]].annotation))
        return f"{key}: {value!r} is not one of {', '.join(valid)}{_nearest(str(value), valid)}"
    reason = detail["msg"].removeprefix("Value error, ")
    return f"{key}: {value!r}: {reason}" if key else reason


def _model_at(location: list[str]) -> type[_Settings]:
    return FileStoreConfig if location == ["store"] else DeltaSyncConfig


def _choices(annotation: object) -> Iterator[str]:
    for choice in get_args(annotation):
        yield str(choice)


def _nearest(word: str, valid: list[str]) -> str:
    matches = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f", did you mean {matches[0]!r}?" if matches else ""
