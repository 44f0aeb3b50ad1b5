"""Block masks: what they hold, and their products against dense ones, forward and backward."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from graphfuse import RowWindows, ops
from graphfuse.testing import check

ROWS, COLS = torch.tensor([2, 0, 2, 1]), torch.tensor([1, 0, 2, 1])  # in no order; row 3 of blocks is empty
SHAPE = (4, 3)  # blocks


def mask(size: int, device: torch.device) -> RowWindows:
    shape = (SHAPE[0] * size, SHAPE[1] * size)
    return RowWindows.from_blocks(ROWS.to(device), COLS.to(device), size, shape)


def dense(values: Tensor) -> Tensor:
    """``[num_blocks, size, size]`` as a matrix."""
    size = values.size(1)
    grid = values.new_zeros(*SHAPE, size, size).index_put((ROWS, COLS), values)
    return grid.transpose(1, 2).reshape(SHAPE[0] * size, SHAPE[1] * size)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_mask_is_its_elements(size: int) -> None:
    windows = mask(size, torch.device("cpu"))
    wanted = dense(torch.ones(4, size, size)).nonzero().flip(1).t()
    other = RowWindows.from_edge_index(wanted, (SHAPE[1] * size, SHAPE[0] * size))
    assert windows.shape == (SHAPE[0] * size, SHAPE[1] * size)
    assert torch.equal(windows.packed_windows, other.packed_windows)
    without_shape = RowWindows.from_blocks(ROWS, COLS, size)
    assert without_shape.shape == (3 * size, 3 * size)
    assert RowWindows.from_blocks(ROWS[:0], COLS[:0], size).shape == (0, 0)


def test_values_of_edges_are_blocks(device: torch.device) -> None:
    a, b = torch.randn(64, 8, device=device), torch.randn(48, 8, device=device)
    found = ops.sddmm(mask(16, device), a, b).view(4, 16, 16)
    wanted = torch.stack([a[16 * r :][:16] @ b[16 * c :][:16].t() for r, c in zip(ROWS, COLS, strict=True)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


PRODUCTS = {
    "SDD": (
        lambda w, a, b: ops.sddmm(w, a, b).view(4, 16, 16),
        lambda a, b: (a @ b.t()).view(4, 16, 3, 16).transpose(1, 2)[ROWS, COLS],
    ),
    "DSD": (
        lambda w, values, b: ops.spmm(w, b, values.flatten()),
        lambda values, b: dense(values) @ b,
    ),
    "DDS": (
        lambda w, values, a: ops.spmm(w, a, values.flatten(), transpose=True).t(),
        lambda values, a: a.t() @ dense(values),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_match_dense_ones(product: str, dtype: torch.dtype, device: torch.device) -> None:
    windows, (op, definition) = mask(16, device), PRODUCTS[product]
    shapes = {"values": (4, 16, 16), "a": (64, 12), "b": (48, 12)}
    names = {"SDD": ("a", "b"), "DSD": ("values", "b"), "DDS": ("values", "a")}[product]
    inputs = {n: torch.randn(shapes[n], device=device).to(dtype).requires_grad_() for n in names}

    def fused(**given: Tensor) -> Any:
        return op(windows, *given.values())

    check(fused, lambda **given: definition(*given.values()), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention_under_a_static_mask(dtype: torch.dtype, device: torch.device) -> None:
    windows, allowed = mask(16, device), dense(torch.ones(4, 16, 16)).bool().to(device)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        score = torch.einsum("ihc,jhc->ijh", q, k) * 8**-0.5
        weight = score.masked_fill(~allowed[:, :, None], float("-inf"))[:48].softmax(1)
        return torch.cat([torch.einsum("ijh,jhc->ihc", weight, v), q.new_zeros(16, 2, 8)])

    sizes = {"q": 64, "k": 48, "v": 48}
    inputs = {n: torch.randn(s, 2, 8, device=device).to(dtype).requires_grad_() for n, s in sizes.items()}
    check(lambda **given: ops.sparse_attention(**given, windows=windows), definition, inputs)


TWO = (ROWS, COLS)
TOO_MANY = torch.zeros(131072, dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((*TWO, 24), ValueError, "`block_size` must be one of (16, 32, 64, 128) (got 24)"),
        ((*TWO, 16.0), ValueError, "`block_size` must be one of (16, 32, 64, 128) (got 16.0)"),
        (([0], COLS, 16), ValueError, "`block_rows` must be an integer tensor of one dimension (got list)"),
        ((ROWS.to("meta"), COLS, 16), ValueError, "of one dimension (got [4], torch.int64 on meta)"),
        ((ROWS.float(), COLS, 16), ValueError, "`block_rows` must be an integer tensor of one dimension"),
        ((ROWS, COLS[None], 16), ValueError, "`block_cols` must be an integer tensor of one dimension"),
        ((ROWS, COLS[1:], 16), ValueError, "`block_cols` must have the length and device of `block_rows`"),
        ((*TWO, 16, (64, 40)), ValueError, "`shape` must be multiples of the block size 16 (got (64, 40))"),
        ((*TWO, 16, 64), ValueError, "`shape` must be (num_dst, num_src) (got 64)"),
        ((*TWO, 16, (64, None)), ValueError, "`shape` must be (num_dst, num_src) (got (64, None))"),
        ((*TWO, 16, (64, 48, 1)), ValueError, "`shape` must be (num_dst, num_src) (got (64, 48, 1))"),
        (
            (*TWO, 16, (32, 48)),
            IndexError,
            "`block_rows` must lie in [0, 2), 32 // 16 of `shape` (got 0 to 2)",
        ),
        ((ROWS, COLS - 1, 16), IndexError, "`block_cols` must lie in [0, 2), 32 // 16 of `shape` (got -1"),
        ((TOO_MANY, TOO_MANY, 128), ValueError, "more than 2147483647 elements; split the mask by rows"),
    ],
)
def test_errors_name_the_argument(given: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        RowWindows.from_blocks(*given)
