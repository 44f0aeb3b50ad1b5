"""What is kept with a graph is made as if nobody were evaluating."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_Make = TypeVar("_Make", bound=Callable[..., Any])


def lasting(make: _Make) -> _Make:
    """``make``, whose tensors training may use even if ``torch.inference_mode()`` is on when it runs.

    Autograd saves no inference tensor, and a record that is built while a model is evaluated, as before the
    first epoch, is found again when the model is trained.
    """

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return make_lasting(make, *args, **kwargs)

    return made  # type: ignore[return-value]


def make_lasting(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What :func:`lasting` makes of ``make`` returns."""
    if not torch.is_inference_mode_enabled():  # else PyTorch's contexts cost more than the rest of a call
        return make(*args, **kwargs)
    with torch.inference_mode(False), torch.no_grad():
        return make(*args, **kwargs)


def savable(x: Tensor | None) -> Tensor | None:
    """``x`` for ``save_for_backward``: a copy of an inference tensor, which autograd does not save."""
    if x is None or not x.is_inference() or torch.is_inference_mode_enabled():
        return x
    return x.clone()
