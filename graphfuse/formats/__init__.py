"""Structures that kernels read, and how to get from a PyG graph to them."""

from graphfuse.formats.cache import clear_cache as clear_cache
from graphfuse.formats.row_windows import RowWindows as RowWindows
