"""What all settings models share: frozen, strict, no unknown keys, a docstring under each field.

Does not hold any setting.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A mapping of settings that was checked as a whole and cannot be changed."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
