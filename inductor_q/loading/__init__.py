"""Checkpoints: their files, where a model's tensors lie in them, and how other libraries pack."""
