"""Benchmarks of graphfuse; see README.md in this folder."""
