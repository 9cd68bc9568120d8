"""Where settings are read from, and how a wrong one is reported: key, value, why, and the nearest valid thing.

Does not hold any setting or default.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from vllm_delta_sync.config.base import Settings
from vllm_delta_sync.config.server import DeltaSyncConfig
from vllm_delta_sync.config.stores import MODELS, StoreConfig, settings_of_uri
from vllm_delta_sync.errors import ConfigError

CONFIG_ENV = "VLLM_DELTA_SYNC_CONFIG"
SECTION = "delta_sync"

_SECRET = re.compile(r"secret|token|password|credential|access_key|account_key|sas", re.IGNORECASE)
_EXAMPLE = f"""\
write, in the YAML that `vllm serve MODEL --config` reads:

  additional-config:
    {SECTION}:
      store: file:///path/to/bucket

or name a YAML file of those settings in the environment variable {CONFIG_ENV}"""


def parse(settings: object, where: str) -> DeltaSyncConfig:
    """Validate one mapping of settings.

    Args:
        settings: what YAML or JSON gave, keys as in `DeltaSyncConfig`.
        where: what to call its source in an error, such as a file name.

    Raises:
        ConfigError: naming each wrong key, its value, why it is wrong and what was probably meant.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where}: expected a mapping of settings, got {_shown(settings)}; {_EXAMPLE}")
    try:
        return DeltaSyncConfig.model_validate(dict(settings))
    except ValidationError as error:
        raise ConfigError(f"{where}: {'; '.join(_explain(detail) for detail in error.errors())}") from None


def store_from_uri(uri: str) -> StoreConfig:
    """The settings of the store at a URI, or at a plain path, which may be relative to the working directory.

    Raises ConfigError for an unknown scheme or a URI that its store cannot mean.
    """
    if not uri:
        raise ConfigError("cannot open the store '': give a path, or a URI such as file:///path/to/bucket")
    try:
        settings = settings_of_uri(uri)
    except ValueError as error:
        raise ConfigError(f"cannot open: {error}") from None
    if settings["kind"] == "file":
        settings["path"] = os.path.abspath(settings["path"])
    try:
        return MODELS[settings["kind"]].model_validate(settings)
    except ValidationError as error:
        wrong = "; ".join(f"its {detail['loc'][0]} {detail['input']!r}: {_reason(detail)}" for detail in error.errors())
        raise ConfigError(f"cannot open the store {uri!r}: {wrong}") from None


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
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # as of a date that there is not
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if isinstance(content, Mapping) and set(content) == {SECTION}:
        content = content[SECTION]
    return parse(content, str(path))


def _explain(detail: ErrorDetails) -> str:
    """One pydantic complaint as a sentence: key, value, why, and the nearest valid thing."""
    model, location = _placed([str(part) for part in detail["loc"]])
    key, value = ".".join(location), detail["input"]
    if detail["type"] == "extra_forbidden":
        if _SECRET.search(location[-1]):
            return f"unknown key {key!r}: secrets are never settings; give them in the environment (docs/operations.md)"
        valid = sorted(model.model_fields)
        shown = "(not shown)" if isinstance(value, str) else f"(value {_shown(value)})"
        return f"unknown key {key!r} {shown}{_nearest(location[-1], valid)}; the keys are {', '.join(valid)}"
    if detail["type"] == "missing":
        hint = ": the bucket to follow, for example file:///path/to/bucket" if key == "store" else ""
        return f"the key {key!r} is missing{hint}"
    if detail["type"] in ("union_tag_not_found", "union_tag_invalid"):
        valid = [kind for kind in MODELS if kind != "memory"]
        if detail["type"] == "union_tag_not_found":
            return f"the key '{key}.kind' is missing: one of {', '.join(valid)}"
        tag = str(detail["ctx"]["tag"])
        return f"{key}.kind: {tag!r} is not one of {', '.join(valid)}{_nearest(tag, valid)}"
    if detail["type"] == "literal_error":
        valid = list(_choices(model.model_fields[location[-1]].annotation))
        return f"{key}: {_shown(value)} is not one of {', '.join(valid)}{_nearest(str(value), valid)}"
    return f"{key}: {_shown(value)}: {_reason(detail)}" if key else _reason(detail)


def _shown(value: object) -> str:
    """A value as messages repeat it: not a URL that may hold a password or a signature, nor what has parts."""
    secret = "@" in value or "?" in value if isinstance(value, str) else isinstance(value, Collection)
    return "(not shown)" if secret else repr(value)


def _placed(location: list[str]) -> tuple[type[Settings], list[str]]:
    """The model that a complaint is about, and its place as the operator wrote it: without the kind of the store."""
    if len(location) > 1 and location[0] == "store" and location[1] in MODELS:
        return MODELS[location[1]], ["store", *location[2:]]
    return DeltaSyncConfig, location


def _reason(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ")


def _choices(annotation: object) -> Iterator[str]:
    for choice in get_args(annotation):
        yield str(choice)


def _nearest(word: str, valid: list[str]) -> str:
    matches = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    return f", did you mean {matches[0]!r}?" if matches else ""
