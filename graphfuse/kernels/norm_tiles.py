"""A residual and a norm of rows that a program holds on chip."""

import triton
import triton.language as tl


@triton.jit
def after_residual(
    y, rows, offs_dim, mask, residual, stride, DIM: tl.constexpr, EPS: tl.constexpr, ACC: tl.constexpr
):
    # What becomes of rows y ACC, [rows, features], 0 where not `mask`: y itself, or with a norm in
    # `residual`, (x [num_rows, DIM], offset [DIM] or None, weight, bias, mean, var, sum), weight (z - mean) /
    # sqrt(var + EPS) + bias of z = x + y + offset. Without mean and var, which are batch norm's, those of
    # each row: layer norm.
    x_ptr, offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr, _ = residual
    if weight_ptr is not None:
        offs, mask_dim = offs_dim[None, :], (offs_dim < DIM)[None, :]
        z = y + tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + offs, mask=mask, other=0.0).to(ACC)
        if offset_ptr is not None:
            z += tl.load(offset_ptr + offs, mask=mask_dim, other=0.0).to(ACC)
        if mean_ptr is None:
            z -= tl.sum(z, 1)[:, None] / DIM
            var = tl.sum(tl.where(mask, z * z, 0.0), 1)[:, None] / DIM
        else:
            z -= tl.load(mean_ptr + offs, mask=mask_dim, other=0.0).to(ACC)
            var = tl.load(var_ptr + offs, mask=mask_dim, other=1.0).to(ACC)
        weight = tl.load(weight_ptr + offs, mask=mask_dim, other=0.0).to(ACC)
        bias = tl.load(bias_ptr + offs, mask=mask_dim, other=0.0).to(ACC)
        y = z * (1.0 / tl.sqrt(var + EPS)) * weight + bias
    return y


@triton.jit
def store_sum(sum_ptr, x_ptr, y, row, place, mask, STRIDE: tl.constexpr, WIDTH: tl.constexpr):
    # To `sum`, if it is there, numbers y of rows `row` int64 and their features `place`, plus x if there is
    # one, whose rows are STRIDE apart; y is rounded, as where it is stored and added to x later.
    if sum_ptr is not None:
        y = y.to(sum_ptr.dtype.element_ty).to(y.dtype)
        if x_ptr is not None:
            y += tl.load(x_ptr + row * STRIDE + place, mask=mask, other=0.0).to(y.dtype)
        tl.store(sum_ptr + row * WIDTH + place, y.to(sum_ptr.dtype.element_ty), mask=mask)
