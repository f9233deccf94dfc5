"""Models in k bits: which layers, from where, saved and loaded bit for bit, or left alone."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from inductor_q import exc, kbit
from inductor_q.kbit import checkpoint as checkpoint_module
from inductor_q.kbit.allocate import LayerError, allocate, measure
from inductor_q.kbit.layers import linear_layers

KBITS = (2, 3, 4, 5)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    """An embedding, two blocks and a head, tied or not; a buffer that is in no state dict."""

    positions: Tensor

    def __init__(self, width: int = 32, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, 40, bias=False)
        self.register_buffer("positions", torch.linspace(0, 1, width), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.lm_head(x)
        return y


def model(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(tied=tied).to(dtype)


def quantized(k: int = 3, absmax: str = "e4m4", **rest: Any) -> Model:
    made = model(**rest)
    kbit.quantize_model(made, k, absmax=absmax, progress=False)
    return made


IDS = torch.arange(24).reshape(2, 12)
LAYERS = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]


def packed(m: nn.Module) -> dict[str, kbit.KBitLinear]:
    return {name: x for name, x in m.named_modules() if isinstance(x, kbit.KBitLinear)}


def assert_same_state(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert list(mine) == list(theirs)
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def unchanged(m: nn.Module, call: Callable[[], Any]) -> None:
    """After an error, the same modules hold the same tensors."""
    modules, state = dict(m.named_modules()), m.state_dict(keep_vars=True)
    values = copy.deepcopy(m.state_dict())
    call()
    assert dict(m.named_modules()) == modules
    for name, tensor in m.state_dict(keep_vars=True).items():
        assert tensor is state[name], name
        assert tensor.is_meta or torch.allclose(tensor, values[name], 0, 0, equal_nan=True), name


# --- one layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("absmax", ["e4m4", "fp16"])
@pytest.mark.parametrize("k", KBITS)
def test_layer_computes_with_its_dequantized_weight(k: int, absmax: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(40, 24)
    layer = kbit.KBitLinear(kbit.quantize(plain.weight, k, absmax=absmax), plain.bias)
    x = torch.randn(3, 5, 40, requires_grad=True)
    y = layer(x)
    expected = nn.functional.linear(x, layer.dequantize(), plain.bias)
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    (expected_grad,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(grad, expected_grad)
    assert layer.format == f"kbit{k}_{absmax}"
    assert repr(layer) == (
        f"KBitLinear(in_features=40, out_features=24, bias=True, kbit{k}_{absmax})"
    )


def test_layer_keeps_its_packed_dtypes() -> None:
    layer = kbit.KBitLinear(kbit.quantize(torch.randn(24, 40), 4, absmax="fp16"))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for cast in (layer.half, layer.bfloat16, layer.double, lambda: layer.to(torch.float16)):
        cast()
        for name, tensor in layer.state_dict().items():
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor, before[name])
    assert layer.to("meta").codebook.is_meta


def test_layer_under_autocast() -> None:
    layer = kbit.KBitLinear(kbit.quantize(torch.randn(24, 40), 4))
    x = torch.randn(3, 40)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, layer(x.bfloat16()))
    assert layer(x).dtype == torch.float32


def test_a_linear_layer_by_itself() -> None:
    plain = nn.Linear(32, 8).eval()
    layer = kbit.quantize_model(plain, 4, progress=False)
    assert isinstance(layer, kbit.KBitLinear)
    assert layer.bias is plain.bias
    assert not layer.training
    back = kbit.dequantize_model(layer)
    assert type(back) is nn.Linear
    assert torch.equal(back.weight, layer.dequantize())


# --- which layers -------------------------------------------------------------------------------


def test_default_layers() -> None:
    m = quantized()
    assert list(packed(m)) == LAYERS
    assert type(m.lm_head) is nn.Linear
    every = kbit.quantize_model(model(), 3, skip=[], progress=False)
    assert list(packed(every)) == [*LAYERS, "lm_head"]


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["up"], ["layers.0.down", "layers.1.down", "lm_head"]),
        (["layers.0.*", "lm_head"], ["layers.1.up", "layers.1.down"]),
        (["*.1.down", "layers.0.up"], ["layers.0.down", "layers.1.up", "lm_head"]),
    ],
)
def test_skip(skip: list[str], left: list[str]) -> None:
    assert list(packed(kbit.quantize_model(model(), 3, skip=skip, progress=False))) == left


def test_skip_that_matches_nothing() -> None:
    m = model()

    def call() -> None:
        with pytest.raises(exc.UnknownLayer, match="no linear layer matches 'lm_haed' in skip"):
            kbit.quantize_model(m, 3, skip=["up", "lm_haed"], progress=False)

    unchanged(m, call)


def test_tied_weights_are_left_alone() -> None:
    m = kbit.quantize_model(model(tied=True), 3, skip=[], progress=False)
    assert list(packed(m)) == LAYERS
    assert m.get_parameter("lm_head.weight") is m.get_parameter("embed.weight")


def test_a_layer_under_two_names_is_one_layer() -> None:
    shared = nn.Linear(32, 32)
    m = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(32, 32))
    kbit.quantize_model(m, 4, progress=False)
    assert isinstance(m[0], kbit.KBitLinear)
    assert m[0] is m[2]
    assert m[0] is not m[3]


def test_k_by_layer() -> None:
    m = kbit.quantize_model(model(), {"layers.0.up": 2, "layers.1.down": 5}, progress=False)
    assert {name: layer.format for name, layer in packed(m).items()} == {
        "layers.0.up": "kbit2_e4m4",
        "layers.1.down": "kbit5_e4m4",
    }


def test_values_are_those_of_quantize_and_dequantize() -> None:
    plain, m = model(), quantized(4)
    for name, layer in packed(m).items():
        weight = plain.get_parameter(f"{name}.weight")
        assert torch.equal(layer.dequantize(), kbit.dequantize(kbit.quantize(weight, 4)))
    expected = m(IDS)
    back = kbit.dequantize_model(m)
    assert not packed(back)
    assert torch.equal(back(IDS), expected)


# --- what is refused, and what is left then -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"k": 6}, exc.UnsupportedBits),
        ({"k": {"layers.0.up": 3, "layers.0.pu": 3}}, exc.UnknownLayer),
        ({"k": {"layers.0.up": 3, "layers.0.down": 1}}, exc.UnsupportedBits),
        ({"k": 3, "absmax": "fp8"}, exc.UnknownAbsmax),
        ({"k": 3, "codebook": torch.linspace(-1, 1, 16)}, exc.WrongCodebook),
        ({"bits": 3.5, "codebook": torch.linspace(-1, 1, 16)}, exc.WrongCodebook),
        ({"bits": 2.0}, exc.WrongBudget),
        ({"bits": 5.3}, exc.WrongBudget),
        ({"bits": 3.5, "importance": {"layers.0.pu": 2.0}}, exc.UnknownLayer),
        ({"k": 3, "bits": 3.5}, TypeError),
        ({"k": 3, "importance": {"layers.0.up": 2.0}}, TypeError),
        ({}, TypeError),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], kind: type[Exception]) -> None:
    m = model()

    def call() -> None:
        with pytest.raises(kind):
            kbit.quantize_model(m, progress=False, **arguments)

    unchanged(m, call)


@pytest.mark.parametrize("bits", [None, 3.5])
def test_a_bad_weight_is_named_and_nothing_is_replaced(bits: float | None) -> None:
    for value, kind in ((math.nan, exc.NotFinite), (40.0, exc.ScaleOutOfRange)):
        m = model()
        with torch.no_grad():
            m.get_parameter("layers.1.down.weight")[3, 5] = value

        def call(m: Model = m, kind: type[exc.QfuseError] = kind) -> None:
            with pytest.raises(kind, match=r"weight of layers\.1\.down "):
                kbit.quantize_model(m, None if bits else 3, bits=bits, progress=False)

        unchanged(m, call)


def test_state_dict_of_another_format() -> None:
    m = quantized(4)
    for other, found in ((quantized(3), "kbit3_e4m4"), (quantized(4, "fp16"), "kbit4_fp16")):
        with pytest.raises(exc.CorruptQuantState) as error:
            m.load_state_dict(other.state_dict())
        assert str(error.value) == (
            "corrupt quantization state: format of layers.0.up should be kbit4_e4m4, is "
            f"{found}. Quantize the model with the k and absmax of the state dict."
        )


def test_state_dict_of_a_corrupt_length() -> None:
    m = quantized(4)
    state = m.state_dict()
    state["layers.0.up.qweight"] = state["layers.0.up.qweight"][:-1]
    with pytest.raises(exc.CorruptQuantState) as error:
        m.load_state_dict(state)
    assert str(error.value) == (
        "corrupt quantization state: layers.0.up.qweight should be torch.int32 (256,), is "
        "torch.int32 (255,). The state dict belongs to a layer of another size, or is damaged."
    )


# --- bits ---------------------------------------------------------------------------------------


def layer_error(name: str, numel: int, scale: float, weight: float = 1.0) -> LayerError:
    return LayerError(
        name=name,
        shape=(numel,),
        power=scale * numel,
        error={k: scale * numel * 4.0**-k for k in KBITS},
        nbytes={k: numel * (4 * k + 1) // 32 for k in KBITS},
        weight=weight,
    )


@pytest.mark.parametrize("bits", [2.25, 2.7, 3.25, 3.5, 4.1, 5.25])
def test_allocation_is_the_best_of_all(bits: float) -> None:
    """Layers of one size, where the greedy choice is exact: against every assignment there is."""
    layers = [layer_error(str(i), 1024, scale) for i, scale in enumerate((1.0, 9.0, 0.05, 3.0))]
    numel = sum(layer.numel for layer in layers)

    def error(ks: tuple[int, ...]) -> float:
        return sum(layer.error[k] for layer, k in zip(layers, ks, strict=True))

    def nbytes(ks: tuple[int, ...]) -> int:
        return sum(layer.nbytes[k] for layer, k in zip(layers, ks, strict=True))

    every = [ks for ks in itertools.product(KBITS, repeat=4) if 8 * nbytes(ks) <= bits * numel]
    chosen = tuple(allocate(layers, bits).values())
    assert chosen in every
    assert error(chosen) == pytest.approx(min(map(error, every)))


def test_allocation_uses_the_budget_and_the_importance() -> None:
    layers = [layer_error("a", 4096, 1.0), layer_error("b", 1024, 1.0), layer_error("c", 64, 1.0)]
    even = allocate(layers, 3.25)
    assert even["a"] == 3  # all alike: the large one, too, gets the average
    weighted = [layers[0], layer_error("b", 1024, 1.0, weight=100.0), layers[2]]
    assert allocate(weighted, 3.25)["b"] == 5
    for bits in (2.3, 3.0, 4.4):
        ks = allocate(layers, bits)
        used = sum(8 * layer.nbytes[ks[layer.name]] for layer in layers)
        room = bits * sum(layer.numel for layer in layers) - used
        assert 0 <= room < 4096


def test_measured_errors() -> None:
    x = torch.randn(32, 48)
    found = measure("x", x, "e4m4")
    for k in KBITS:
        q = kbit.quantize(x, k)
        assert found.error[k] == pytest.approx(float((x - kbit.dequantize(q)).square().sum()))
        assert found.nbytes[k] == q.nbytes
    steps = [found.error[k] - found.error[k + 1] for k in KBITS[:-1]]
    assert steps == sorted(steps, reverse=True)  # each further bit removes less


def test_bits_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    m = model()
    with torch.no_grad():
        m.get_parameter("layers.1.up.weight").mul_(8)  # its errors count 64 times as much
    kbit.quantize_model(m, bits=3.5, progress=True)
    weights = {name: layer.kbit_weight for name, layer in packed(m).items()}
    assert weights["layers.1.up"].k == 5
    used = 8 * sum(q.nbytes for q in weights.values()) / (4 * 32 * 64)
    assert 3.0 < used <= 3.5
    table = capsys.readouterr().err
    for text in ("Bits by layer", "layers.1.up", "64 x 32", "5.25", " dB", "8,192"):
        assert text in table
    importance = {"layers.0.down": 1e6}
    other = kbit.quantize_model(model(), bits=3.5, importance=importance, progress=False)
    assert packed(other)["layers.0.down"].format == "kbit5_e4m4"


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("k", "absmax"), [(2, "e4m4"), (5, "fp16")])
def test_save_and_load(tmp_path: Path, k: int, absmax: str, tied: bool) -> None:
    m = quantized(k, absmax, tied=tied)
    kbit.save(m, tmp_path / "m.safetensors")
    with kbit.meta_parameters():
        empty = Model(tied=tied).to(torch.bfloat16)
    for into in (model(seed=1, tied=tied), quantized(k, absmax, seed=1, tied=tied), empty):
        kbit.load(into, tmp_path / "m.safetensors")
        assert_same_state(into, m)
        assert torch.equal(into(IDS), m(IDS))
        tensors = {id(into.lm_head.weight), id(into.embed.weight)}
        assert len(tensors) == (1 if tied else 2)
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_the_state_dict_is_plain_safetensors(tmp_path: Path) -> None:
    """What others write and read: no wrapper, no pickled state, no shared memory."""
    m = quantized(3)
    safetensors.torch.save_file(m.state_dict(), tmp_path / "m.safetensors")
    other = quantized(3, seed=1)
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert_same_state(other, m)
    kbit.save(m, tmp_path / "n.safetensors")
    assert safetensors.torch.load_file(tmp_path / "n.safetensors").keys() == m.state_dict().keys()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    kbit.save(quantized(3), path)
    before = path.read_bytes()

    def full(tensors: Any, file: str, metadata: Any) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        kbit.save(quantized(4), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def rewritten(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a file and keep its header's entries."""
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata)


DAMAGE: list[tuple[str, Callable[[Path], Any], type[exc.QfuseError], str]] = [
    (
        "cut off",
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        exc.WrongCheckpoint,
        "incomplete",
    ),
    ("empty", lambda path: path.write_bytes(b""), exc.WrongCheckpoint, "header"),
    ("gone", lambda path: path.unlink(), exc.WrongCheckpoint, "No such file"),
    (
        "not ours",
        lambda path: safetensors.torch.save_file(model().state_dict(), path),
        exc.WrongCheckpoint,
        "save did not write it",
    ),
    (
        "packed length",
        lambda path: rewritten(
            path, lambda t: t.update({"layers.1.up.qweight": t["layers.1.up.qweight"][:-3]})
        ),
        exc.CorruptQuantState,
        r"layers.1.up.qweight should be torch.int32 \(192,\), is torch.int32 \(189,\)",
    ),
    (
        "scales lost",
        lambda path: rewritten(path, lambda t: t.pop("layers.1.up.absmax")),
        exc.WrongCheckpoint,
        "layers.1.up.absmax is not in it",
    ),
    (
        "norm lost",
        lambda path: rewritten(path, lambda t: t.pop("layers.1.norm.weight")),
        exc.WrongCheckpoint,
        "layers.1.norm.weight is not in it",
    ),
    (
        "one too many",
        lambda path: rewritten(path, lambda t: t.update({"more": torch.ones(1)})),
        exc.WrongCheckpoint,
        "more is not in the model",
    ),
    (
        "another shape",
        lambda path: rewritten(path, lambda t: t.update({"embed.weight": torch.ones(3, 32)})),
        exc.WrongCheckpoint,
        r"embed.weight is \(3, 32\) in it, \(40, 32\) here",
    ),
]


@pytest.mark.parametrize(
    ("damage", "kind", "text"), [d[1:] for d in DAMAGE], ids=[d[0] for d in DAMAGE]
)
def test_a_damaged_file_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], Any], kind: type[exc.QfuseError], text: str
) -> None:
    path = tmp_path / "m.safetensors"
    kbit.save(quantized(3), path)
    damage(path)
    for into in (model(seed=1), quantized(3, seed=1)):

        def call(into: Model = into) -> None:
            with pytest.raises(kind, match=text):
                kbit.load(into, path)

        unchanged(into, call)


def test_a_file_of_another_k_changes_nothing(tmp_path: Path) -> None:
    kbit.save(quantized(3), tmp_path / "m.safetensors")
    into = quantized(4, seed=1)

    def call() -> None:
        with pytest.raises(exc.CorruptQuantState, match="should be kbit4_e4m4, is kbit3_e4m4"):
            kbit.load(into, tmp_path / "m.safetensors")

    unchanged(into, call)


# --- straight from a checkpoint -----------------------------------------------------------------


def shards(m: nn.Module, folder: Path, *, drop: str = "") -> Path:
    """The state of `m` in three files and an index, as transformers saves it."""
    state = {name: t for name, t in m.state_dict().items() if name != drop}
    if m.get_parameter("lm_head.weight") is m.get_parameter("embed.weight"):
        del state["lm_head.weight"]
    index = {name: f"model-{i % 3 + 1}-of-3.safetensors" for i, name in enumerate(state)}
    for file in set(index.values()):
        part = {name: state[name] for name, where in index.items() if where == file}
        safetensors.torch.save_file(part, folder / file)
    (folder / checkpoint_module.INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["folder", "index", "file", "folder of one"])
def test_from_a_checkpoint(tmp_path: Path, kind: str, tied: bool) -> None:
    plain = model(tied=tied)
    path = tmp_path
    if kind in ("folder", "index"):
        shards(plain, tmp_path)
        path = tmp_path / (checkpoint_module.INDEX if kind == "index" else "")
    else:
        state = plain.state_dict()
        if tied:
            del state["lm_head.weight"]
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        path = tmp_path / ("model.safetensors" if kind == "file" else "")
    with kbit.meta_parameters():
        m = Model(tied=tied).to(torch.bfloat16)
    assert all(p.is_meta for p in m.parameters())
    kbit.quantize_model(m, 3, checkpoint=path, progress=False)
    assert_same_state(m, kbit.quantize_model(plain, 3, progress=False))
    assert torch.equal(m(IDS), plain(IDS))
    assert (m.lm_head.weight is m.embed.weight) == tied


@pytest.mark.parametrize("arguments", [{"k": 3}, {"bits": 3.5}], ids=["k", "bits"])
def test_one_weight_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """What the reader hands out is freed before the next is read: counted, not believed."""
    path = shards(model(), tmp_path)
    alive: dict[str, weakref.ref[Tensor]] = {}
    most = 0
    read = checkpoint_module.Checkpoint.read

    def counted(self: checkpoint_module.Checkpoint, name: str) -> Tensor:
        nonlocal most
        tensor = read(self, name)
        alive[name] = weakref.ref(tensor)
        held = [n for n, ref in alive.items() if ref() is not None and n in weights]
        most = max(most, len(held))
        return tensor

    weights = {f"{name}.weight" for name in LAYERS}
    monkeypatch.setattr(checkpoint_module.Checkpoint, "read", counted)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)
    kbit.quantize_model(m, checkpoint=path, progress=False, **arguments)
    assert weights < set(alive)
    assert most == 1
    held = sum(t.nbytes for n, t in m.state_dict().items() if n.rpartition(".")[0] in LAYERS)
    assert held < 0.5 * sum(model().get_parameter(n).nbytes for n in weights)


@pytest.mark.parametrize("name", ["layers.1.up.weight", "layers.1.up.bias", "embed.weight"])
def test_a_checkpoint_without_a_tensor_changes_nothing(tmp_path: Path, name: str) -> None:
    path = shards(model(), tmp_path, drop=name)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)

    def call() -> None:
        with pytest.raises(exc.WrongCheckpoint, match=f"left as it was:\n  {name} is not in it"):
            kbit.quantize_model(m, 3, checkpoint=path, progress=False)

    unchanged(m, call)


@pytest.mark.parametrize("bad", ["nan", "shape", "missing file", "index"])
def test_a_bad_checkpoint_changes_nothing(tmp_path: Path, bad: str) -> None:
    plain = model()
    with torch.no_grad():
        if bad == "nan":
            plain.get_parameter("layers.1.down.weight")[0, 0] = math.nan
    path = shards(plain, tmp_path)
    with kbit.meta_parameters():
        m = Model(16 if bad == "shape" else 32).to(torch.bfloat16)
    if bad == "missing file":
        (path / "model-2-of-3.safetensors").unlink()
    if bad == "index":
        (path / checkpoint_module.INDEX).write_text("{")

    def call() -> None:
        kind = exc.NotFinite if bad == "nan" else exc.WrongCheckpoint
        with pytest.raises(kind):
            kbit.quantize_model(m, 3, checkpoint=path, progress=False)

    unchanged(m, call)


def test_a_buffer_without_a_value_is_an_error(tmp_path: Path) -> None:
    path = shards(model(), tmp_path)
    with torch.device("meta"):
        m = Model().to(torch.bfloat16)
    with pytest.raises(exc.WrongCheckpoint, match="the buffer positions is on the meta device"):
        kbit.quantize_model(m, 3, checkpoint=path, progress=False)


@pytest.mark.gpu
def test_gpu_from_a_checkpoint_and_from_a_file(tmp_path: Path) -> None:
    """Everything lands on the device, what is in no checkpoint too; the bits are those of a CPU."""
    expected = quantized(3)
    with kbit.meta_parameters():
        m = Model().to(torch.bfloat16)
        into = Model().to(torch.bfloat16)
    path = shards(model(), tmp_path)
    kbit.quantize_model(m, 3, checkpoint=path, device="cuda", progress=False)
    kbit.save(m, tmp_path / "m.safetensors")
    kbit.load(into, tmp_path / "m.safetensors", device="cuda")
    for made in (m, into):
        assert {t.device.type for t in (*made.parameters(), *made.buffers())} == {"cuda"}
        torch.testing.assert_close(made(IDS.cuda()).cpu(), expected(IDS), atol=0.05, rtol=0.05)
        assert_same_state(copy.deepcopy(made).cpu(), expected)


def test_meta_parameters_end_with_the_block() -> None:
    with pytest.raises(RuntimeError, match="inside"), kbit.meta_parameters():
        assert nn.Linear(4, 4).weight.is_meta
        raise RuntimeError("inside")
    assert not nn.Linear(4, 4).weight.is_meta


def test_adapters_are_no_layers_to_quantize() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["up"])
    wrapped = peft.get_peft_model(model(), config)
    assert [name.rpartition("model.")[2] for name in linear_layers(wrapped)] == [
        "layers.0.up.base_layer",
        "layers.0.down",
        "layers.1.up.base_layer",
        "layers.1.down",
        "lm_head",
    ]
