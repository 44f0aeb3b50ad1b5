"""The linear map in front of layers that have none of their own, of features that may be sparse."""

# no `from __future__ import annotations`: TorchScript reads the annotations as objects
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear as PyGLinear

from graphfuse.formats.environment import is_on
from graphfuse.nn._projection import affine


class Linear(PyGLinear):
    r"""The map :math:`x_i' = W x_i + b`: a drop-in for PyG's ``Linear`` whose features may be sparse.

    AGNNConv projects nothing, so that its network begins with a dense layer; on bags of words that layer
    takes more time than the aggregations. A ``torch.sparse`` matrix (COO, CSR or CSC) is mapped by
    :func:`graphfuse.ops.spmm` over row windows of its entries, which are built once for a matrix object: no
    dense features are made, and a CUDA graph can be captured, forward and backward. Anything else is
    PyTorch's product, as in PyG, where a kernel sums up the gradient of the bias if rows are many; and so is
    all with ``GRAPHFUSE_DISABLE=1``. Constructor, ``state_dict`` and initialisation are PyG's, and those of
    :class:`torch.nn.Linear` but for names of arguments.

    Args:
        in_channels: Size of each input row; ``-1`` derives it from the first input.
        out_channels: Size of each output row.
        bias: Whether there is a bias.
        weight_initializer: ``"glorot"``, ``"uniform"``, ``"kaiming_uniform"`` or ``None``, that of
            :class:`torch.nn.Linear`.
        bias_initializer: ``"zeros"`` or ``None``, that of :class:`torch.nn.Linear`.

    Shapes:
        - **input:** features :math:`(*, F_{in})`; a matrix if it is sparse
        - **output:** features :math:`(*, F_{out})`, dense
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps the rows of ``x``, whose last dimension is ``in_channels``."""
        if not torch.jit.is_scripting() and _is_matrix(x):
            return affine(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


@torch.jit.unused
def _is_matrix(x: Tensor) -> bool:
    return x.dim() == 2 and not is_on("GRAPHFUSE_DISABLE")
