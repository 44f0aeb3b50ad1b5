"""What tells a backward pass that its windows were refilled since the forward pass."""

from __future__ import annotations


class Filling:
    """What windows in memory that stays hold, until they are filled with other edges."""

    __slots__ = ("replaced",)

    def __init__(self) -> None:
        self.replaced = False

    def require(self) -> None:
        """Raises ``RuntimeError`` if there are other edges now."""
        if self.replaced:
            raise RuntimeError(
                "row windows were refilled between the forward and the backward pass, whose gradients would "
                "be those of other edges; call backward before the next refill, or take snapshot() for "
                "batches that are alive together"
            )
