"""PyG transforms."""

from graphfuse.transforms.to_row_windows import ToRowWindows as ToRowWindows
