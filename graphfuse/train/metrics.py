"""Metrics of scores and targets, each over all rows at once."""

from __future__ import annotations

from torch import Tensor


def accuracy(logits: Tensor, y: Tensor) -> float:
    """Share of rows whose largest score is that of class ``y``."""
    return float((logits.argmax(1) == y.view(-1)).double().mean())


def mean_absolute_error(logits: Tensor, y: Tensor) -> float:
    """Mean distance of prediction and target."""
    return float((logits.view(-1).double() - y.view(-1).double()).abs().mean())


def roc_auc(logits: Tensor, y: Tensor) -> float:
    """Probability that a random 1 scores higher than a random 0; equal scores count half."""
    positive = y.view(-1) > 0
    score, ones = logits.view(-1).double(), int(positive.sum())
    zeros = score.numel() - ones
    if ones == 0 or zeros == 0:
        raise ValueError(f"`y` must hold both 0 and 1 (got {zeros} and {ones})")
    _, place, count = score.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0).double() - (count.double() - 1) / 2)[place]  # of equals, the mean
    return float((rank[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))
