"""PyTorch Geometric layers that run as fused GPU kernels."""

import warnings as _warnings

__version__ = "0.1.0.dev0"

from graphfuse import nn as nn
from graphfuse import ops as ops
from graphfuse import reference as reference
from graphfuse import transforms as transforms
from graphfuse.convert import convert as convert
from graphfuse.convert import revert as revert
from graphfuse.formats import RefillableWindows as RefillableWindows
from graphfuse.formats import RowWindows as RowWindows
from graphfuse.formats import clear_cache as clear_cache
from graphfuse.nn._dispatch import why_not as why_not
from graphfuse.warmup import warmup as warmup

from graphfuse import env as _env  # isort: skip  # which needs all of the above

for _sentence in _env.untested():  # once, as a module is imported once
    _warnings.warn(_sentence, stacklevel=2)
