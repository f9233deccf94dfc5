"""Interpreters of `QuantFormat.decode`: eager torch, Inductor loops, Triton source."""
