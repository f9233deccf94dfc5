"""The qfuse:: ops: schema, eager reference, fake and autograd."""
