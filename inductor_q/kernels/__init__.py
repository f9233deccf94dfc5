"""Triton kernels, one public verb a file."""
