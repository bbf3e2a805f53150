"""Triton kernels. Imported where they are used and nowhere else: triton is an extra."""
