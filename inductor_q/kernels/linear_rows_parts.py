"""Templates of the Triton kernels of few rows; `linear_rows_triton` fills them in.

`product` and `linear_rows` depend on the format, all but `finish` on how many weights there are.
"""

#: What is added to a sum, in float32, before its one rounding.
FINISH = """
@triton.jit
def finish(total, feature, features, token, rows, bias, b, projected, width, rank, start, which,
           ADAPTED: tl.constexpr, BIASED: tl.constexpr):
    real = feature < features
    inside = token < rows
    if ADAPTED:
        for first in range(0, rank, 16):
            r = first + tl.arange(0, 16)
            mask = real[:, None] & (r < rank)[None, :]
            at = b + feature.to(tl.int64)[:, None] * rank + r[None, :]
            high = tl.load(at, mask=mask, other=0)
            mask = (r < rank)[:, None] & inside[None, :]
            at = projected + token[None, :] * width + start + r[:, None]
            low = tl.load(at, mask=mask, other=0)
            if total.shape[1] == 1:
                total += tl.sum(high.to(tl.float32) * tl.trans(low), 1)[:, None]
            else:
                total = tl.dot(high.to(tl.float32), low, total, input_precision="ieee")
    if BIASED > 0:
        none = 1 - ((BIASED >> which) & 1)
        mask = feature + none * features < features
        total += tl.load(bias + feature, mask=mask, other=0).to(tl.float32)[:, None]
    return total


@triton.jit
def store(out, total, feature, features, token, rows):
    mask = (feature < features)[:, None] & (token < rows)[None, :]
    to = out + token[None, :] * features + feature[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=mask)
"""

#: The sums of a tile over some steps. `fetch` loads what a step takes: units, scales, columns of x.
#: Features behind the last are the last once more, which nobody stores.
PRODUCT = """
@triton.jit
def fetch(x, qweight, codebook, {pointers}row, features, token, rows, cols, blocks, step, end,
          GROUP: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, ALIGN: tl.constexpr,
          EVEN: tl.constexpr, ROWS: tl.constexpr):
    GROUPS: tl.constexpr = DEPTH // GROUP
    UNITS: tl.constexpr = GROUP // {codes}
    group = tl.arange(0, GROUPS)[None, :, None]
    within = tl.arange(0, UNITS)[None, None, :]
    units = blocks * ALIGN
    begins = group * GROUP + step * DEPTH
    mask = tl.full([FEATURES, GROUPS, UNITS], 0, tl.int32) + step < end
    of_group = tl.full([FEATURES, GROUPS, 1], 0, tl.int32) + step < end
    if not EVEN:
        mask = mask & (begins + within * {codes} < cols)
        of_group = of_group & (begins < cols)
    i = row * cols + begins
    u = row * units + (step * (DEPTH // {codes}) + group * UNITS + within)
    packed = qweight.to(tl.pointer_type({unit}))  # whatever dtype the bytes are stored in
{units}
{scales}
    column = step * DEPTH + tl.arange(0, DEPTH)
    last = tl.minimum(cols, end * DEPTH)
    here = (column < last)[:, None] & (token < rows)[None, :]
    part = tl.load(x + token[None, :] * cols + column[:, None], mask=here, other=0)
    return {held}, part


@triton.jit
def product(x, qweight, codebook, {pointers}feature, features, token, rows, cols, blocks,
            begin, end,
            GROUP: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, ALIGN: tl.constexpr,
            EVEN: tl.constexpr, ROWS: tl.constexpr, IS_SUM: tl.constexpr, WIDE: tl.constexpr):
    row = tl.minimum(feature, features - 1)[:, None, None]
    if WIDE:
        row = row.to(tl.int64)
    dtype: tl.constexpr = tl.float32 if IS_SUM else x.dtype.element_ty
    total = tl.zeros([FEATURES, DEPTH if IS_SUM else ROWS], tl.float32)
    {held}, part = fetch(x, qweight, codebook, {pointers}row, features, token, rows, cols, blocks,
                         begin, end, GROUP, FEATURES, DEPTH, ALIGN, EVEN, ROWS)
    for step in range(begin, end):
        {following}, next_part = fetch(
            x, qweight, codebook, {pointers}row, features, token, rows, cols, blocks, step + 1, end,
            GROUP, FEATURES, DEPTH, ALIGN, EVEN, ROWS)
{values}
        w = tl.reshape({joined}, [FEATURES, DEPTH])
        if not EVEN:
            w = tl.where((step * DEPTH + tl.arange(0, DEPTH) < cols)[None, :], w, 0.0).to(dtype)
        if IS_SUM:
            total += w * tl.reshape(part, [1, DEPTH]).to(tl.float32)
        else:
            total = tl.dot(w, part, total)
        {held}, part = {following}, next_part
    if IS_SUM:
        total = tl.sum(total, 1)[:, None]
    return total
"""

LINEAR_ROWS = """
@triton.jit(do_not_specialize=["steps", "rows", "width", {quoted}])
def linear_rows(x, projected, partial, {each}cols, blocks, steps, rows, width, {every}
                GATED: tl.constexpr, ADAPTED: tl.constexpr, BIASED: tl.constexpr,
                ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
                GROUP: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
                IS_SUM: tl.constexpr, IS_SPLIT: tl.constexpr, WIDE: tl.constexpr):
    tile = tl.program_id(0)
    part = tl.program_id(1)
    token = tl.arange(0, ROWS)
    begin = part * steps
    end = tl.minimum(begin + steps, tl.cdiv(cols, DEPTH))
{choice}
    feature = tile * FEATURES + tl.arange(0, FEATURES)
    to = partial + (part * rows + token)[None, :] * {everything} + feature[:, None]
{first}
    total = product(x, {pointers}feature, features, token, rows, cols, blocks, begin, end,
                    GROUP, FEATURES, DEPTH, ALIGN, EVEN, ROWS, IS_SUM, WIDE)
    if IS_SPLIT:
        mask = (feature < features)[:, None] & (token < rows)[None, :]
        tl.store(to + before, total, mask=mask)
    else:
        total = finish(total, feature, features, token, rows, bias, b, projected, width, rank,
                       start, which, ADAPTED, BIASED)
    if GATED:
        gate = total / (1 + tl.exp(-total))
{second}
        total = product(x, {pointers}feature, features, token, rows, cols, blocks, begin, end,
                        GROUP, FEATURES, DEPTH, ALIGN, EVEN, ROWS, IS_SUM, WIDE)
        if IS_SPLIT:
            mask = (feature < features)[:, None] & (token < rows)[None, :]
            tl.store(to + before, total, mask=mask)
        else:
            total = gate * finish(total, feature, features, token, rows, bias, b, projected, width,
                                  rank, start, which, ADAPTED, BIASED)
    if not IS_SPLIT:
        store(out, total, feature, features, token, rows)
"""

#: Parts are added in their order.
ADD_PARTS = """
@triton.jit
def added(partial, parts, feature, features, token, rows, everything):
    mask = (feature < features)[:, None] & (token < rows)[None, :]
    at = partial + token[None, :] * everything + feature[:, None]
    total = tl.load(at, mask=mask, other=0)
    for part in range(1, parts):
        total += tl.load(at + part * rows * everything, mask=mask, other=0)
    return total


@triton.jit(do_not_specialize=["parts", "rows", "width", {quoted}])
def add_parts(partial, projected, {each}parts, rows, width, {every}
              GATED: tl.constexpr, ADAPTED: tl.constexpr, BIASED: tl.constexpr,
              ROWS: tl.constexpr, FEATURES: tl.constexpr):
    tile = tl.program_id(0)
    token = tl.arange(0, ROWS)
{choice}
    feature = tile * FEATURES + tl.arange(0, FEATURES)
{first}
    total = added(partial + before, parts, feature, features, token, rows, {everything})
    total = finish(total, feature, features, token, rows, bias, b, projected, width, rank, start,
                   which, ADAPTED, BIASED)
    if GATED:
        gate = total / (1 + tl.exp(-total))
{second}
        total = added(partial + before, parts, feature, features, token, rows, {everything})
        total = gate * finish(total, feature, features, token, rows, bias, b, projected, width,
                              rank, start, which, ADAPTED, BIASED)
    store(out, total, feature, features, token, rows)
"""

#: A program projects some rows of x onto one row of an adapter's A, times the adapter's factor.
PROJECT = """
@triton.jit(do_not_specialize=["rows", "width", {quoted}])
def project(projected, x, {matrices}cols, rows, width, {ranks}
            {scalings}ROWS: tl.constexpr, DEPTH: tl.constexpr):
    column = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    which = {which}
    a = {matrix} + (column - {before}) * cols
    d = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, DEPTH], tl.float32)
    for first in range(0, cols, DEPTH):
        there = first + d < cols
        low = tl.load(a + first + d, mask=there, other=0).to(tl.float32)
        mask = (token < rows)[:, None] & there[None, :]
        part = tl.load(x + token[:, None] * cols + (first + d)[None, :], mask=mask, other=0)
        total += part.to(tl.float32) * low[None, :]
    result = tl.sum(total, 1) * {scaling}
    tl.store(projected + token * width + column, result, mask=token < rows)
"""
