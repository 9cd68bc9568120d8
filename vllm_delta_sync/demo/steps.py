"""One real optimiser step as two checkpoints, for measurements and tests that need true changes, not random ones.

Does not publish anything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_delta_sync.demo import checkpoint

if TYPE_CHECKING:
    from vllm_delta_sync.demo.train import Trainer

FIRST, SECOND = 6, 7
"""The steps shown. Before them Adam's moments are still warming up, and its updates are larger than they stay."""


def real_step(
    cache: Path, name: str = "smollm2-135m-step", prepare: Callable[[Trainer], None] | None = None
) -> tuple[Path, Path]:
    """SmolLM2-135M, bf16, after steps 6 and 7 of the demo's trainer: directories of the older and the newer checkpoint.

    The first call trains for about a minute; the results stay in `cache`.

    Args:
        name: folder of the results in `cache`; another one for each `prepare`.
        prepare: what happens to the trainer before its first step.
    """
    base = checkpoint.smollm2(cache)

    def build(directory: Path) -> None:
        from vllm_delta_sync.demo.train import Trainer

        trainer = Trainer(base)
        if prepare is not None:
            prepare(trainer)
        for step in range(1, SECOND + 1):
            trainer.step()
            if step >= FIRST:
                target = directory / str(step)
                target.mkdir()
                checkpoint.write(target, trainer.state(), like=base)

    both = checkpoint.build_once(cache / name, build)
    return both / str(FIRST), both / str(SECOND)
