"""Environment variables that calls ask for, and hardly anyone sets."""

from __future__ import annotations

import os
from typing import Any

# What os.environ keeps, by encoded names. For a name that is not there it raises an exception and catches it:
# two of them are a tenth of the host time of a layer's forward.
_KEPT: Any = getattr(os.environ, "_data", None)
_NAMES: dict[str, Any] = {}


def is_set(name: str) -> bool:
    """Whether the variable ``name`` is set, to whatever."""
    if _KEPT is None:
        return name in os.environ
    encoded = _NAMES.get(name)
    if encoded is None:
        encoded = _NAMES[name] = os.environ.encodekey(name)
    return encoded in _KEPT


def is_on(name: str) -> bool:
    """Whether the variable ``name`` is set, and neither empty nor 0."""
    return is_set(name) and os.environ[name] not in ("", "0")
