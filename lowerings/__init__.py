"""qfuse:: op -> Inductor IR, Triton template or extern kernel."""

assert __name__ == "inductor_q.lowerings", f"import it as inductor_q.lowerings, not {__name__}"
