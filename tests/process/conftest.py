"""Puts the shared helpers of tests/ on the path.

Holds no assertions.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
