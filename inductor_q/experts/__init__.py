"""Mixture-of-experts layers on quantized experts, with LoRA."""
