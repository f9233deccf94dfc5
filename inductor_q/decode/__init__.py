"""Interpreters of `QuantFormat.decode`: eager torch, Inductor loops, Triton and C++ source."""
