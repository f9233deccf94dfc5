"""FX graph -> FX graph, in terms of qfuse:: ops."""

assert __name__ == "inductor_q.passes", f"import it as inductor_q.passes, not {__name__}"
