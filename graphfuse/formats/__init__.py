"""Structures that kernels read, and how to get from a PyG graph to them."""

from graphfuse.formats.cache import clear_cache as clear_cache
from graphfuse.formats.refillable import RefillableWindows as RefillableWindows
from graphfuse.formats.row_windows import RowWindows as RowWindows
from graphfuse.formats.save import load_windows as load_windows
from graphfuse.formats.save import save_windows as save_windows
