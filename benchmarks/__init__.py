"""Benchmarks of qfuse against eager bitsandbytes + PEFT and stock Inductor."""
