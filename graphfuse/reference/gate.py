"""Definition of the gated skip connection in plain PyTorch: any float dtype, differentiable."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_skip(out: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    r"""A learned mean of two rows.

    .. math::
        y_i = \beta_i s_i + (1 - \beta_i)\, o_i, \qquad
        \beta_i = \mathrm{sigmoid}(w_1^\top o_i + w_2^\top s_i + w_3^\top (o_i - s_i))

    Args:
        out: Rows :math:`o`, ``[num_rows, dim]``.
        skip: Rows :math:`s`, ``[num_rows, dim]``.
        weight: :math:`w_1, w_2, w_3` side by side, ``[1, 3 * dim]``.

    Returns:
        ``[num_rows, dim]``.
    """
    beta = torch.nn.functional.linear(torch.cat([out, skip, out - skip], -1), weight).sigmoid()
    return beta * skip + (1 - beta) * out
