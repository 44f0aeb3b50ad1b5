"""A residual and a norm of rows that a program holds on chip."""

import triton
import triton.language as tl


@triton.jit
def normed(
    z, offs_dim, mask, weight_ptr, bias_ptr, mean_ptr, var_ptr, DIM: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    # weight (z - mean) / sqrt(var + EPS) + bias of rows z, [rows, features], which are 0 where not `mask`;
    # offs_dim [1, features]. Without mean and var, which are batch norm's, those of each row: layer norm.
    mask_dim = offs_dim < DIM
    if mean_ptr is None:
        z -= tl.sum(z, 1)[:, None] / DIM
        var = tl.sum(tl.where(mask, z * z, 0.0), 1)[:, None] / DIM
    else:
        z -= tl.load(mean_ptr + offs_dim, mask=mask_dim, other=0.0).to(ACC)
        var = tl.load(var_ptr + offs_dim, mask=mask_dim, other=1.0).to(ACC)
    weight = tl.load(weight_ptr + offs_dim, mask=mask_dim, other=0.0).to(ACC)
    bias = tl.load(bias_ptr + offs_dim, mask=mask_dim, other=0.0).to(ACC)
    return z * (1.0 / tl.sqrt(var + EPS)) * weight + bias


@triton.jit
def after_residual(
    y, rows, offs_dim, mask, residual, STRIDE: tl.constexpr, DIM: tl.constexpr, EPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    # What becomes of the rows y: the norm of x + y + offset, or y itself without a residual, which is
    # (x [num_rows, DIM], offset [DIM] or None, weight, bias, mean, var).
    x_ptr, offset_ptr, weight_ptr, bias_ptr, mean_ptr, var_ptr = residual
    if x_ptr is not None:
        offs = offs_dim[None, :]
        at = x_ptr + rows.to(tl.int64)[:, None] * STRIDE + offs
        y += tl.load(at, mask=mask, other=0.0).to(ACC)
        if offset_ptr is not None:
            y += tl.load(offset_ptr + offs, mask=offs < DIM, other=0.0).to(ACC)
        y = normed(y, offs, mask, weight_ptr, bias_ptr, mean_ptr, var_ptr, DIM, EPS, ACC)
    return y
