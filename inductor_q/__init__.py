"""qfuse: a torch.compile backend for models with quantized weights and trained adapters."""

__version__ = "0.1.0"
