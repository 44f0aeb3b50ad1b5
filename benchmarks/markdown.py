"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], lines: Iterable[Sequence[str | None]]) -> str:
    """A table, ``-`` where there is nothing; the empty string if there are no lines."""
    shown = [" | ".join(_cell(text) for text in line) for line in lines]
    if not shown:
        return ""
    return "\n".join(f"| {line} |" for line in [" | ".join(head), " | ".join(["---"] * len(head)), *shown])


def figure(value: float | None) -> str | None:
    """Three significant digits, and all digits before the point."""
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def _cell(text: str | None) -> str:
    return "-" if text is None else text.replace("|", "\\|")
