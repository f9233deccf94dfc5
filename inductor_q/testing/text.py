"""Turn text into batches of token ids without a file of a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch


class ByteTokenizer:
    """Encode UTF-8 bytes as token ids 0..255, then bos, eos and pad. Nothing is lost, no file
    needed.
    """

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 264  # padded to a multiple of 8

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int] | torch.Tensor) -> str:
        return bytes(int(i) for i in ids if int(i) < 256).decode("utf-8", errors="replace")


def batches(
    text: str,
    tokenizer: ByteTokenizer,
    *,
    batch_size: int,
    seq_len: int,
    steps: int,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Iterator[torch.Tensor]:
    """Return ``steps`` batches [batch_size, seq_len] of random windows of ``text``.

    The same seed gives the same batches.
    """
    ids = torch.tensor(tokenizer.encode(text), dtype=torch.long)
    if len(ids) < seq_len:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than seq_len={seq_len}")
    rng = random.Random(seed)
    for _ in range(steps):
        starts = [rng.randint(0, len(ids) - seq_len) for _ in range(batch_size)]
        yield torch.stack([ids[start : start + seq_len] for start in starts]).to(device)
