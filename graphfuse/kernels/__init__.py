"""Triton kernels and their launchers. Importing a kernel module imports triton; importing this does not."""
