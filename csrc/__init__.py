"""CUDA and C++ sources, shipped as package data and compiled at first use."""

assert __name__ == "inductor_q.csrc", f"import it as inductor_q.csrc, not {__name__}"
