"""Thresholds under which layers of toy size take the paths of large ones."""

from __future__ import annotations

#: Every product with a frozen weight is one for eight bits, however small.
ANY_PRODUCT = {"quantize_products.min_rows": 1, "quantize_products.min_elements": 1}

#: And every product with packed experts.
ANY_EXPERT = {**ANY_PRODUCT, "quantize_products.min_expert_elements": 1}
