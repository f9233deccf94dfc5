"""Whose format each layer has, who computes with it, and what that moves: doctor and explain."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from inductor_q import kbit, testing
from inductor_q.capture.live import NOT_KNOWN, layers_of
from inductor_q.diagnostics import check_model, observe, serving
from inductor_q.diagnostics.checks import packed_weights
from inductor_q.diagnostics.checks.finding import Finding
from inductor_q.diagnostics.explanation import Explanation, Layer, Serving
from inductor_q.diagnostics.render import html, text, words
from inductor_q.diagnostics.render import json as as_json
from inductor_q.experts.packing import pack
from inductor_q.experts.stack import ExpertStack
from inductor_q.kernels import dequantize_cpp
from inductor_q.kernels.dequantize import POINTWISE
from tests.support.compiling import no_codegen, step
from tests.support.thresholds import ANY_PRODUCT

BF16 = torch.bfloat16
NO_COMPILER = "there is no C++ compiler"


def bitsandbytes() -> nn.Module:
    pytest.importorskip("bitsandbytes")
    return testing.lora_linear(64, 64, adapter_dtype=BF16)


def int8() -> nn.Module:
    from tests.support import torchao_weights

    return nn.Sequential(torchao_weights.linear(torchao_weights.CONFIGS["int8 row"][0]))


def fp8() -> nn.Module:
    from tests.support import fp8_models

    return nn.Sequential(fp8_models.layers(fp8_models.net())[0])


def own() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 32, dtype=BF16))
    return kbit.quantize_model(model, 3, skip=(), progress=False)


#: A model with one packed weight: its library, what that calls the format, the name of the layout.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[str, str, str]]] = {
    "bitsandbytes": (bitsandbytes, ("bitsandbytes", "nf4", "nf4_b64_nested")),
    "torchao": (int8, ("torchao", "Int8Tensor", "int8_row")),
    "transformers": (fp8, ("transformers", "fp8", "fp8_e4m3_128x128")),
    "ours": (own, ("inductor_q", "kbit3_e4m4", "kbit3_e4m4")),
}


#: The bytes of the parts of such a weight: codes, and then scales and what else there is.
STORED = {
    "bitsandbytes": (64 * 64 // 2, 64, 4),  # an absmax of a byte per 64, a float32 for 256 of these
    "torchao": (128 * 256, 128 * 4, 128),
    "transformers": (128 * 128, 4),
    "ours": (64 * 32 * 3 // 8, 64, 8 * 4),
}


def finding(model: nn.Module) -> Finding:
    [found] = [f for f in check_model(model) if f.check == packed_weights.NAME]
    return found


# --- doctor -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_doctor_names_library_format_layout_and_cost(name: str) -> None:
    make, said = MODELS[name]
    model = make()
    [weight] = layers_of(model)
    assert (weight.library, weight.format, weight.layout) == said
    assert weight.nbytes == sum(STORED[name])
    found = finding(model)
    written = words.size(2 * weight.shape[0] * weight.shape[1])
    assert found.status == "ok"
    assert found.found == (
        f"{said[0]} {said[1]}, 1 layer, {said[2]}: cpp decodes to 16 bits: "
        f"{words.size(weight.nbytes)}, and {written} written and read again"
    )


def test_doctor_says_who_serves_where_no_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(dequantize_cpp.KERNEL), "missing", lambda self: NO_COMPILER)
    found = finding(int8())
    assert found.status == "warn"
    assert "inductor decodes to 16 bits" in found.found
    assert found.found.endswith(f"(not cpp: {NO_COMPILER})")


def test_doctor_tells_what_nothing_reads() -> None:
    layer = nn.Linear(64, 64)
    layer.weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    found = finding(nn.Sequential(layer))
    assert found.status == "warn"
    assert found.found == f"torch int8, 1 layer: left to torch: {NOT_KNOWN}"


def test_doctor_of_a_model_without_packed_weights() -> None:
    assert finding(nn.Linear(4, 4)) == Finding(packed_weights.NAME, "ok", "none")


def test_experts_are_not_decoded_as_matrices() -> None:
    operands = pack(torch.randn(2, 32, 64), "nf4_b64")
    [weight] = layers_of(ExpertStack(operands, "nf4_b64", (2, 32, 64), transposed=False))
    one = serving.expected(weight)
    # On a CPU the reference is no stopgap: it decodes one expert after the other.
    stored = 2 * 32 * 64 // 2 + 2 * 32 * 4
    assert one == Serving("scatter2scatter", "reference", stored, written=2 * 2 * 32 * 64)
    assert not serving.lacks_kernel(one)


# --- explain ------------------------------------------------------------------------------------


class Looked(nn.Module):
    """Give a layer a name that no model of another test has, which may live on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.looked_at = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.looked_at(x)
        return found


def explained(layer: nn.Module, *inputs: torch.Tensor, **options: Any) -> Explanation:
    torch._dynamo.reset()
    model = Looked(layer)
    with observe(dry_run=False) as observation, no_codegen():
        call: Any = torch.compile(model, backend=testing.qfuse_backend(), options=options or None)
        if any(p.requires_grad for p in model.parameters()):
            step(call, *inputs, module=model)
        else:
            with torch.no_grad():
                call(*inputs)
    return observation.explanation()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(0)).to(BF16)


def only(run: Explanation) -> Layer:
    [layer] = [layer for layer in run.layers if "looked_at" in layer.module]
    return layer


def test_a_layer_of_many_rows_is_decoded() -> None:
    layer = only(explained(bitsandbytes(), tokens(2048).requires_grad_()))
    assert (layer.library, layer.format, layer.layout) == MODELS["bitsandbytes"][1]
    [one] = layer.serving
    assert one == Serving("dequantize", "cpp", packed=2116, written=64 * 64 * 2)
    assert one.moved == 2116 + 2 * 8192


def test_a_layer_of_few_rows_is_read_packed() -> None:
    model = bitsandbytes().requires_grad_(False)
    [one] = only(explained(model, tokens(4))).serving
    assert one == Serving("linear_rows", "cpp", packed=2116)
    assert one.moved == 2116


def test_a_product_in_eight_bits_is_decoded_to_them() -> None:
    given = {"qfuse.compute": "int8", "qfuse.thresholds": ANY_PRODUCT}
    [one] = only(explained(bitsandbytes(), tokens(64).requires_grad_(), **given)).serving
    assert one == Serving("requantize", POINTWISE, packed=2116, written=64 * 64)
    assert words.serves(one).startswith("inductor decodes to 8 bits: 2.1 KiB, and 4.0 KiB")


def test_what_is_not_compiled_is_left_to_its_library() -> None:
    model = Looked(bitsandbytes())
    with observe(whole_process=True) as observation:
        model(tokens(4))
    layer = only(observation.explanation())
    assert layer.serving == (Serving("", "bitsandbytes"),)


def run_of(*layers: Layer) -> Explanation:
    return Explanation(target="train.py", layers=layers)


def packed_layer(index: int, *serving: Serving) -> Layer:
    return Layer(
        module=f"layers.{index}",
        kind="linear",
        format="Int4TilePackedTo4dTensor",
        status="fused",
        library="torchao",
        layout="int4_tiles_g128",
        serving=serving,
    )


MISSING = "this machine has no NVRTC, which comes with every build of torch for CUDA"
DECODED = Serving("dequantize", "triton", 3 << 20, 8 << 20, (f"cuda: {MISSING}",))
READ = Serving("linear_rows", "cuda", 3 << 20)


def test_text_has_a_line_for_layers_alike_within_80_columns() -> None:
    run = run_of(*(packed_layer(i, READ, DECODED) for i in range(3)), packed_layer(3, READ))
    printed = io.StringIO()
    text.write(run, printed)
    shown = printed.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    said = " ".join(shown[shown.index("Packed weights") :].split())
    assert said.startswith(
        "Packed weights torchao Int4TilePackedTo4dTensor 3 layers, int4_tiles_g128 "
        "cuda reads it packed: 9.0 MiB; triton decodes to 16 bits: 9.0 MiB, and 24.0 MiB written "
        f"and read again (not cuda: {MISSING}) "
        "torchao Int4TilePackedTo4dTensor 1 layer, int4_tiles_g128 cuda reads it packed: 3.0 MiB"
    )


def test_json_and_html_have_them_too() -> None:
    run = run_of(packed_layer(0, READ, DECODED))
    assert as_json.from_json(as_json.to_json(run)) == run
    [layer] = json.loads(as_json.to_json(run))["layers"]
    assert (layer["library"], layer["layout"]) == ("torchao", "int4_tiles_g128")
    assert layer["serving"][0]["packed"] == 3 << 20
    page = html.render(run)
    for said in ("torchao", "int4_tiles_g128", "cuda reads it packed: 3.0 MiB", MISSING):
        assert said in page
