"""Run the Triton kernel for attention of a few queries in Triton's interpreter, on a CPU.

Print the number of cases in which its error against float64 is at most that of the reference in
the same dtype, up to a factor, and zero where no key is seen.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from inductor_q.kernels import attention_rows_reference, attention_rows_triton
from inductor_q.kernels.attention_rows_triton import Config, Plan
from inductor_q.kernels.rows_calls import AttentionRows

#: Batch, heads of keys, queries of each, keys, features: a cache that fills blocks, and others.
SIZES = ((2, 2, 4, 96, 16), (1, 3, 1, 33, 32), (3, 1, 17, 70, 16))


def tensors(size: tuple[int, ...], dtype: torch.dtype) -> AttentionRows:
    """Queries with heads side by side, a cache with room behind, a mask for each sequence."""
    batch, heads, rows, keys, features = size
    generator = torch.Generator().manual_seed(sum(size))
    query = torch.randn(batch, rows, heads, features, generator=generator).transpose(1, 2)
    cache = torch.randn(2, batch, heads, keys + 5, features, generator=generator)[..., 5:, :]
    key, value = cache.to(dtype)
    last = torch.randint(keys // 2, keys, (batch, 1, 1, 1), generator=generator)
    mask = (torch.arange(keys) <= last) & (torch.arange(keys) >= 3)
    return AttentionRows(query.to(dtype), key, value, mask, 0.3)


def error(got: torch.Tensor, call: AttentionRows) -> float:
    wide = replace(
        call, query=call.query.double(), key=call.key.double(), value=call.value.double()
    )
    exact = attention_rows_reference.KERNEL.run(wide)
    return float((got.double() - exact).norm() / exact.norm().clamp_min(1e-30))


def main() -> int:
    cases = 0
    dtypes = (torch.float32, torch.float16)  # the interpreter multiplies bfloat16 as integers
    for size, dtype, block in itertools.product(SIZES, dtypes, (16, 32)):
        call = tensors(size, dtype)
        masks = {"each": call.mask, "one": call.mask[:1], "none": torch.zeros_like(call.mask)}
        for name, mask in masks.items():
            masked = replace(call, mask=mask)
            assert not attention_rows_triton.KERNEL.refuses(masked)
            got = Plan(masked, Config(block=block))(masked)
            again = Plan(masked, Config(block=block))(masked)
            assert torch.equal(got, again) and got.is_contiguous()
            if name == "none":
                assert not got.any()
            else:
                limit = error(attention_rows_reference.KERNEL.run(masked), masked)
                assert error(got, masked) <= 1.25 * limit + 1e-7, (size, dtype, name)
            cases += 1
    return cases


if __name__ == "__main__":
    print(main())
