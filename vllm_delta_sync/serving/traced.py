"""One rank's layout as it travels to the controller: geometry only, no addresses.

Plain data without torch or vLLM, so that the controller's decisions can be tested without either.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_delta_sync.serving.affine import Region


@dataclass(frozen=True)
class RankLayout:
    """What a rank's trace found.

    `regions` in the rank's own order (lanes are reported in it); `unsupported` are (tensor, reason).
    """

    regions: tuple[Region, ...]
    unsupported: tuple[tuple[str, str], ...]
