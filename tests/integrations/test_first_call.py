"""What bitsandbytes does in the first call of a layer is done before anything is traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import testing
from inductor_q.integrations.first_call import prepare_first_call

bnb: Any = pytest.importorskip("bitsandbytes")


def biased() -> Any:
    layer = testing.quantized_linear(torch.randn(64, 64), torch.randn(64))
    assert layer.bias.dtype is torch.float32
    return layer


def test_a_bias_gets_the_dtype_of_its_layer() -> None:
    layer = biased()
    other, bias, x = copy.deepcopy(layer), layer.bias, torch.randn(2, 64)
    prepare_first_call(nn.Sequential(layer))
    assert layer.bias is bias and bias.dtype is layer.compute_dtype is torch.bfloat16
    assert torch.equal(layer(x), other(x)) and torch.equal(layer.bias, other.bias)


def test_a_dtype_that_is_open_stays_open() -> None:
    layer = biased()
    layer.compute_dtype, layer.compute_type_is_set = None, False
    prepare_first_call(layer)
    assert layer.bias.dtype is torch.float32 and layer.compute_dtype is None


def test_codes_of_llm_int8_are_in_the_state() -> None:
    made = bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=0.0)
    layer = made.to("cpu")
    assert layer.weight.CB is not None
    other, x = copy.deepcopy(layer), torch.randn(2, 64, dtype=torch.bfloat16)
    prepare_first_call(layer)
    assert layer.weight.CB is None and layer.state.CB is not None
    assert torch.equal(layer(x), other(x))
    prepare_first_call(layer)  # as for a model that is compiled again
    assert torch.equal(layer(x), other(x))
