"""A small real trainer: an fp32 master of a Llama checkpoint, AdamW at an RL learning rate, batches of real English.

Does not know of vLLM, buckets or publishing; it stands for whatever trainer a user has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics  # the Python reference manual as plain text, part of every Python

import torch
from tokenizers import Tokenizer

LEARNING_RATE = 3e-6
LENGTH = 128


class Trainer:
    """Trains all parameters; deterministic for a seed and a number of threads.

    Args:
        checkpoint: directory of a Hugging Face Llama checkpoint; its weights are cast up to fp32.
        seed: chooses the batches.
        batch: sequences of 128 tokens a step.
    """

    def __init__(self, checkpoint: Path, seed: int = 0, batch: int = 4) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model.train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self._batches = _batches(checkpoint / "tokenizer.json", seed, batch)
        self.steps = 0  # taken so far

    def step(self) -> float:
        """One optimiser step on the next batch; returns the loss in nats per token."""
        batch = next(self._batches)
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        """The fp32 master weights by their checkpoint names, a tied table once; live, not copies."""
        return dict(self.model.named_parameters())


def _batches(tokenizer_file: Path, seed: int, batch: int) -> Iterator[torch.Tensor]:
    """Endless batches of i64 [batch, 128] cut at random places out of the manual."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    encoded: list[int] = Tokenizer.from_file(str(tokenizer_file)).encode(text).ids
    tokens = torch.tensor(encoded)
    random = torch.Generator().manual_seed(seed)
    for _ in itertools.count():
        starts = torch.randint(len(tokens) - LENGTH, (batch,), generator=random)
        yield torch.stack([tokens[start : start + LENGTH] for start in starts.tolist()])
