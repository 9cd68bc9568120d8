"""Every error that a user of vllm-delta-sync can see, as one tree.

Does not import anything: a caller may catch these without torch or vLLM. Each class says *what kind of thing* is wrong;
the message says what, where, why and what to do. `cause` is the short, stable label used in metrics and status
(`failures by cause`).
"""

from __future__ import annotations


class DeltaSyncError(Exception):
    """Root of the tree."""

    cause = "error"


# --- configuration -------------------------------------------------------------------------------------------------
class ConfigError(DeltaSyncError):
    """A setting is unknown, out of range, or contradicts another one."""

    cause = "config"


class UnsupportedEngine(ConfigError):
    """This vLLM build, executor or plugin setting cannot carry a commit between two steps."""

    cause = "unsupported_engine"


class NotCaughtUp(DeltaSyncError):
    """A server under `start: catch_up` did not get to the latest version in time."""

    cause = "not_caught_up"


# --- the store -----------------------------------------------------------------------------------------------------
class StoreError(DeltaSyncError):
    """The object store refused or failed."""

    cause = "store"


class NotFound(StoreError):
    """The key does not exist."""

    cause = "not_found"


class AlreadyExists(StoreError):
    """`put(create=True)` found the key taken."""

    cause = "already_exists"


class PreconditionFailed(StoreError):
    """`put(over=…)` found another object than the one it was to replace."""

    cause = "precondition"


class Unauthorized(StoreError):
    """Credentials are missing, wrong or lack the right."""

    cause = "unauthorized"


class RateLimited(StoreError):
    """The store asks for patience.

    Args:
        retry_after: seconds until the store will answer again.
    """

    cause = "rate_limited"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(StoreError):
    """The store cannot be reached, timed out, or failed for now."""

    cause = "unavailable"


class CacheError(StoreError):
    """The cache on this node cannot be used: disk full, no permission, no room; fetching goes on without it."""

    cause = "cache"


# --- the log -------------------------------------------------------------------------------------------------------
class LogError(DeltaSyncError):
    """What is in the log cannot be followed."""

    cause = "log"


class MalformedObject(LogError):
    """A manifest, table, shard or pointer breaks a rule of docs/protocol.md."""

    cause = "malformed"


class DigestMismatch(LogError):
    """An object's size or digest is not the one its referrer states."""

    cause = "digest"


class VersionGap(LogError):
    """The chain from the version held to the one wanted is broken, forked or goes backwards."""

    cause = "version_gap"


class BaseNeeded(LogError):
    """Changes cannot be composed or inverted from what they hold alone: the values before them are needed."""

    cause = "base_needed"


class RivalWriter(LogError):
    """Another publisher wrote to this run."""

    cause = "rival_writer"


# --- tensors and state ---------------------------------------------------------------------------------------------
class StateError(DeltaSyncError):
    """Weights are not what they must be."""

    cause = "state"


class BaseMismatch(StateError):
    """The weights at hand are not those of the base (or of any version) of the log."""

    cause = "base_mismatch"


class StateHashMismatch(StateError):
    """An update, or an audit, does not come to the state hash that the log states."""

    cause = "state_hash"


class StrayWrite(StateError):
    """A live weight changed between staging and commit."""

    cause = "stray_write"


class UnmappedTensor(StateError):
    """The serving model never loads a published tensor, and the policy refuses that."""

    cause = "unmapped"


class UnsupportedLayout(StateError):
    """A tensor reaches live memory in a way that cannot be patched in place."""

    cause = "unsupported_layout"


class StagingLimit(StateError):
    """A step changes more than may wait in memory for its commit."""

    cause = "staging_limit"


class Poisoned(StateError):
    """A commit failed and its rollback too: the live weights are not trusted any more."""

    cause = "poisoned"


# --- publishing ----------------------------------------------------------------------------------------------------
class PublishError(DeltaSyncError):
    """A version did not become durable; it and those behind it were unwound, nothing is lost."""

    cause = "publish"


class AnchorOutpaced(DeltaSyncError):
    """Training changed more while a checkpoint was uploaded than the publisher remembers; it is tried again later."""

    cause = "anchor_outpaced"


class UnsettledWrite(PublishError):
    """Whether a version became the tip, durably, cannot be told; only a publisher that resumes from the log can."""

    cause = "unsettled_write"
