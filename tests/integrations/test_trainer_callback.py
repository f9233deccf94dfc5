"""transformers' Trainer with one import, and what `QfuseCallback` refuses, says and writes."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import inductor_q
from examples.common import byte_tokenizer
from inductor_q import backend, testing
from inductor_q.exc import (
    NoProfileSteps,
    NoRegion,
    OptionsWithoutCompile,
    ReplicatedModel,
    UnknownMode,
    UnknownOption,
)
from inductor_q.integrations import QfuseCallback, compile_trainer, local_device_map
from inductor_q.integrations.backend_name import forget_backend, name_backend
from inductor_q.integrations.lengths import lengths_vary, mark_lengths
from inductor_q.integrations.profile import StepProfile
from inductor_q.integrations.regions import base_model, compiled_regions
from inductor_q.integrations.states import States
from inductor_q.presets import PRESETS, Entry, tuned
from tests.support import ranks
from tests.support.compiling import SMALL, no_codegen
from tests.support.processes import environment
from tests.support.trainers import COMMON, model, rows, train

for extra in ("accelerate", "bitsandbytes", "peft", "transformers"):
    pytest.importorskip(extra)

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def trainer(out: Path, *, layers: int = 1, net: Any = None, **settings: Any) -> Any:
    arguments: Any = TrainingArguments(output_dir=str(out), **{**COMMON, **settings})
    pad: Any = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    data: Any = rows(40)
    return Trainer(model(layers) if net is None else net, arguments, pad, data, data[:4])


@pytest.mark.slow
def test_checkpointing_and_evaluation_keep_one_graph_a_mode(tmp_path: Path) -> None:
    """On a CPU with AVX512-BF16 the step after an evaluation used to fail."""
    settings: dict[str, Any] = {
        "max_steps": 8,
        "bf16": True,
        "gradient_checkpointing": True,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "torch_compile": True,  # accelerate would compile the model too
    }
    compiled = train(lambda: trainer(tmp_path, **settings), compiled=True)
    settings["torch_compile"] = False
    eager = train(lambda: trainer(tmp_path, **settings), compiled=False)
    assert (compiled.graphs, compiled.breaks) == (2, [])
    for key in ("loss", "eval_loss"):
        assert len(compiled.logged(key)) == len(eager.logged(key)) > 1
        assert compiled.logged(key) == pytest.approx(eager.logged(key), rel=1e-3)


@pytest.mark.slow
def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    """As training.md has it: the first length has a graph, the others a second one, unless torch
    remembers that they vary."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    net = testing.qlora_model(
        testing.tiny_qwen3_config(), adapter_dtype=torch.float32, prepare=True
    )
    ids = [torch.arange(n) % 200 for n in (12, 12, 20, 20, 33, 33)]
    data: Any = [{"input_ids": row, "labels": row} for row in ids]
    made: Any = DataLoader(data, batch_size=2)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    model, optimizer, loader = accelerator.prepare(net, optimizer, made)
    inductor_q.compile(accelerator.unwrap_model(model))
    with testing.CompileTrace() as trace, no_codegen():
        for batch in loader:
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert trace.graphs in (1, 2) and trace.breaks == []
    assert inductor_q.report(net).fused == 14


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Adapters, optimizer and data are where the run was that did not stop."""
    settings: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = train(lambda: trainer(tmp_path, **settings), compiled=True)
    checkpoint = str(tmp_path / "checkpoint-3")
    rest = train(lambda: trainer(tmp_path, **settings), compiled=True, resume=checkpoint)
    assert rest.breaks == [] and rest.graphs <= 2
    assert len(rest.logged("loss")) == 6
    assert rest.logged("loss")[3:] == pytest.approx(whole.logged("loss")[3:], rel=1e-3)


@pytest.mark.slow
def test_a_hundred_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of as many rows each; where `dynamic` is given, it is torch's."""

    def graphs(**given: Any) -> int:
        run = train(lambda: trainer(tmp_path, max_steps=100), compiled=True, **given)
        assert run.breaks == []
        return run.graphs

    assert (graphs(), graphs(dynamic=True)) == (1, 1)
    assert capsys.readouterr().out.count("qfuse: 7 of 7 quantized layers fused; 1 graph") == 2


def _shard(trainer: Any) -> Any:
    """Have accelerate shard by FSDP2 between ranks on a CPU, as it does by itself between GPUs."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
    )
    plugin.set_mixed_precision("bf16")
    state = trainer.accelerator.state
    state.fsdp_plugin, state.distributed_type = plugin, DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    return trainer


def _train_on_a_rank(rank: int, port: int, folder: str) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in place.items()}, WORLD_SIZE="2")
    torch.set_num_threads(1)
    config = testing.tiny_qwen3_config(num_hidden_layers=2, pad_token_id=258)
    kinds: Any = {"adapter_dtype": torch.bfloat16, "quant_storage": torch.bfloat16}
    made: list[Any] = []

    def make() -> Any:
        net = testing.qlora_model(config, **kinds)
        made.append(trainer(Path(folder), net=net, max_steps=4, bf16=True))
        return made[-1]

    whole = train(make, compiled=False)
    assert isinstance(made[0].model_wrapped, DistributedDataParallel)
    run = train(lambda: _shard(make()), compiled=True, options=SMALL)
    assert run.graphs <= 2 and run.breaks == []  # of the first length, and of the others
    # FSDP's mixed precision rounds logits and loss to bfloat16
    assert run.logged("loss") == pytest.approx(whole.logged("loss"), rel=2**-8)
    net = made[1].model
    weight = net.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    assert isinstance(weight, DTensor) and weight.to_local().numel() * 2 == weight.numel()
    told = inductor_q.report(net)
    assert (told.fused, len(told.layers)) == (14, 14)
    ranks.leave()


@pytest.mark.slow
def test_a_model_that_accelerate_shards_on_two_ranks(tmp_path: Path) -> None:
    """Losses are those of DDP in eager mode; each rank asserts, and fails the join."""
    ranks.on_two_ranks(tmp_path, _train_on_a_rank, str(tmp_path))


def test_which_data_has_rows_of_different_lengths() -> None:
    """Nothing is read of data whose rows are made when they are read."""
    datasets = pytest.importorskip("datasets")

    def drawn(batch: Any) -> Any:
        raise AssertionError("a row was read")

    ids = [[1, 2], [1, 2, 3], [4]]
    data = datasets.Dataset.from_dict({"input_ids": ids, "text": ["a", "bb", "c"]})
    assert lengths_vary(data) and lengths_vary(data.to_list())
    for same in (
        data.select([0, 0]),
        data.remove_columns("input_ids"),
        [{"input_ids": None}, {"input_ids": [1]}],
        [{"label_ids": 1, "doc_ids": "a", 0: 2}, {"label_ids": 2, "doc_ids": "bc", 0: [3]}],
        data.with_transform(drawn),
        iter(data),
        None,
    ):
        assert not lengths_vary(same)


def test_what_is_marked_as_a_length() -> None:
    """Ids, masks of two and four dimensions, and positions of three kinds; of numbers, the second
    dimension alone; nothing where no length is known."""
    inputs = {
        **{"input_ids": torch.ones(2, 7, dtype=torch.long), "attention_mask": torch.ones(2, 7)},
        **{"mask": torch.ones(2, 1, 7, 7, dtype=torch.bool), "inputs_embeds": torch.ones(2, 7, 7)},
        **{"position_ids": torch.ones(3, 2, 7, dtype=torch.long), "labels": None},
    }
    mark_lengths(inputs)
    found = {name: weak(tensor) for name, tensor in inputs.items()}
    assert found == {
        **{"input_ids": {1}, "attention_mask": {1}, "mask": {2, 3}, "inputs_embeds": {1}},
        **{"position_ids": {2}, "labels": set()},
    }
    alone = torch.ones(2, 7)
    mark_lengths({"x": alone})
    assert not weak(alone)


def weak(tensor: Any) -> set[int]:
    """The dimensions that have a mark which Dynamo may leave."""
    return set(getattr(tensor, "_dynamo_weak_dynamic_indices", ()))


def test_options_reach_the_backend_and_are_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownOption, match=r"qfuse\.numerics"):
        QfuseCallback(options={"qfuse.numeric": "strict"})
    options = {"qfuse.numerics": "strict"}
    train(lambda: trainer(tmp_path, max_steps=1), compiled=True, options=options)
    report = inductor_q.last_report()
    assert report is not None and report.numerics == "strict"


@pytest.mark.parametrize(
    ("batches", "given", "told"),
    [
        (1, {}, ""),
        (2, {}, ""),
        (2, {"options": {"triton": {"cudagraphs": True}}}, "user"),
        (2, {"mode": "reduce-overhead"}, "mode reduce-overhead"),
        (2, {"mode": "max-autotune-no-cudagraphs"}, ""),
    ],
)
def test_cuda_graphs_and_gradients_that_add_up(
    batches: int,
    given: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next batch's CUDA graph would overwrite the gradients."""
    entry = Entry(value=True, evidence="measured")
    preset = replace(PRESETS["cpu"], options={"triton.cudagraphs": entry})
    here = tuned.place_of(torch.device("cpu"))
    tuned.write(tmp_path / "tuned.json", here, preset, base="cpu")
    monkeypatch.setenv("QFUSE_PRESET", str(tmp_path / "tuned.json"))
    settings: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": batches}
    train(lambda: trainer(tmp_path, **settings), compiled=True, **given)
    report = inductor_q.last_report()
    assert report is not None
    graphs = report.options.get("triton.cudagraphs", {"value": "False"})
    assert graphs["value"] == str(batches == 1)
    assert (f"CUDA graphs (triton.cudagraphs: {told}) stay off" in caplog.text) == bool(told)


def test_layers_fused_in_training_are_not_said_to_be_fused_nowhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where an evaluation's graph leaves them to their library, as that of LLM.int8 does."""
    config = testing.tiny_qwen3_config(num_hidden_layers=1, pad_token_id=258)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    inductor_q.quantize(base, "llm_int8")
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    settings: dict[str, Any] = {
        "max_steps": 1,
        "bf16": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    net = get_peft_model(base, lora)
    train(lambda: trainer(tmp_path, net=net, **settings), compiled=True)
    assert "codes with codes" in caplog.text
    assert "none is fused" not in caplog.text


def test_evaluation_keeps_its_predictions_out_of_cuda_graphs(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    asked = {"triton.cudagraphs": True}
    train(lambda: trainer(tmp_path, **settings), compiled=True, options=asked)
    values = {report.options["triton.cudagraphs"]["value"] for report in backend.reports()}
    assert values == {"True", "False"}
    last = inductor_q.last_report()
    assert last is not None and last.options["triton.cudagraphs"]["value"] == "False"


def test_what_was_compiled_before_results_are_kept_is_compiled_anew() -> None:
    states = States(model(1), {"options": None})
    trains, infers = states.state(), (*states.state()[:-1], False)
    states.functions = {(None, trains): len, (None, infers): len}
    states.keep_results(True)
    assert states.keeps_results and list(states.functions) == [(None, trains)]


def test_the_import_lets_the_backend_be_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def named() -> Any:
        given: Any = {"torch_compile": True, "torch_compile_backend": "qfuse"}
        return trainer(tmp_path, max_steps=1, **given)

    forget_backend()
    with pytest.raises(ValueError, match="'QFUSE' is not a valid DynamoBackend"):
        named()
    name_backend()  # as the import of inductor_q.integrations does
    compiled = train(named, compiled=True)
    assert (compiled.graphs, compiled.breaks) == (1, [])
    assert "torch_compile_backend=" not in caplog.text  # as it says of another one
    compile_trainer(trainer(tmp_path, torch_compile=True))
    assert "torch_compile_backend='inductor': QfuseCallback compiles" in caplog.text


def test_the_mode_of_the_trainer_is_that_of_the_compile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def made(mode: str, **settings: Any) -> Any:
        given: Any = {"torch_compile": True, "torch_compile_backend": "qfuse"}
        return trainer(tmp_path, max_steps=1, **given, torch_compile_mode=mode, **settings)

    name_backend()
    seen = []
    given: tuple[dict[str, Any], ...] = ({}, {"mode": "default"})
    for settings in given:
        train(lambda: made("max-autotune-no-cudagraphs"), compiled=True, **settings)
        report = inductor_q.last_report()
        assert report is not None
        seen.append("max_autotune" in report.options)
    assert seen == [True, False]
    assert "torch_compile_mode='max-autotune-no-cudagraphs' is ignored" in caplog.text
    with pytest.raises(UnknownMode, match="no-such-mode"):
        compile_trainer(made("no-such-mode"))


def test_each_training_of_one_callback_says_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = QfuseCallback()
    said = []
    with no_codegen():
        for _ in range(2):
            once = trainer(tmp_path, max_steps=2)
            once.add_callback(callback)
            callback.on_init_end(once.args, once.state, once.control, model=once.model)
            once.train()
            out, err = capsys.readouterr()
            said.append((out + err).count("7 of 7 quantized layers fused; 1 graph, 0 breaks"))
    assert said == [1, 1]


def test_biases_in_float32_break_no_graph(tmp_path: Path) -> None:
    """As PEFT's `prepare_model_for_kbit_training` leaves those of Qwen2."""
    from transformers import Qwen2Config

    shapes = testing.tiny_qwen3_config(num_hidden_layers=1).to_dict()
    kept = [name for name in shapes if name.endswith("_size") or name.startswith("num_")]
    config = Qwen2Config(**{name: shapes[name] for name in kept}, pad_token_id=258)

    nets: list[Any] = []

    def made() -> Any:
        nets.append(net := testing.qlora_model(config, prepare=True))
        biases = [p for name, p in net.named_parameters() if name.endswith("_proj.base_layer.bias")]
        assert len(biases) == 3 and {p.dtype for p in biases} == {torch.float32}
        return trainer(tmp_path, net=net, max_steps=2, bf16=True)

    eager, compiled = (train(made, compiled=c) for c in (False, True))
    assert (compiled.graphs, compiled.breaks) == (1, [])
    assert compiled.logged("loss") == pytest.approx(eager.logged("loss"), rel=1e-3)
    assert inductor_q.report(nets[-1]).fused == 7


@pytest.mark.parametrize("first", ["inductor_q.integrations", "accelerate"])
def test_importing_integrations_names_the_backend(first: str) -> None:
    """No callback need be made before the trainer, and either import may be the first."""
    code = (
        f"import {first}\n"
        "import inductor_q.integrations\n"
        "from accelerate.utils import DynamoBackend\n"
        "print(DynamoBackend('QFUSE').value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.stdout == "QFUSE\n", done.stderr


@pytest.mark.parametrize("quantized", [False, True])
def test_several_gpus_of_one_process_are_refused(quantized: bool, tmp_path: Path) -> None:
    """Where transformers would replicate the model, which it does not if bitsandbytes packed it."""
    arguments = TrainingArguments(str(tmp_path), use_cpu=True)
    arguments._n_gpu = 2
    given: Any = nn.Linear(2, 2)
    given.is_loaded_in_4bit = quantized
    refused = contextlib.nullcontext() if quantized else pytest.raises(ReplicatedModel, match="2 G")
    with refused:
        QfuseCallback().on_init_end(arguments, None, None, model=given)


def test_options_without_compile_are_refused() -> None:
    with pytest.raises(OptionsWithoutCompile, match="QfuseCallback has options and enabled=False"):
        QfuseCallback(options={"qfuse.numerics": "strict"}, enabled=False)
    QfuseCallback(enabled=False)


def test_auto_compiles_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"qfuse.numerics": "strict"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not QfuseCallback(options=options, enabled="auto").enabled
    assert "nothing is compiled" in caplog.text


@pytest.mark.parametrize(
    ("has_gpu", "variables", "expected"),
    [
        (False, {}, {"": "cpu"}),
        (True, {}, {"": 0}),
        (True, {"LOCAL_RANK": "3"}, {"": 3}),
        (True, {"LOCAL_RANK": "3", "ACCELERATE_USE_FSDP": "true"}, None),
        (True, {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, None),
        (
            True,
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            {"": 0},
        ),
    ],
)
def test_each_process_loads_on_its_own_device(
    has_gpu: bool, variables: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is sharded while it is loaded takes no map."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    for name in ("LOCAL_RANK", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert local_device_map() == expected


def test_layers_share_a_graph(tmp_path: Path) -> None:
    def make() -> Any:
        return trainer(tmp_path, layers=3, max_steps=1)

    compiled = train(make, compiled=True, regions="layers")
    assert (compiled.graphs, compiled.breaks) == (1, [])


def test_regions_follow_who_calls_the_model() -> None:
    whole = model()
    base = base_model(whole)
    assert compiled_regions(whole) == [whole]
    base._original_forward = base.forward  # accelerate wraps a model for autocast
    base.forward = lambda *args, **kwargs: base._original_forward(*args, **kwargs)
    assert compiled_regions(whole) == [whole]
    del base._original_forward
    assert compiled_regions(whole) == [base.model]
    assert compiled_regions(whole, "layers") == list(base.model.layers)
    plain = nn.Linear(2, 2)
    assert compiled_regions(plain) == [plain]
    with pytest.raises(NoRegion, match="Linear names no layers"):
        compiled_regions(plain, "layers")


def test_a_model_is_compiled_once_for_the_same_settings() -> None:
    """A second training, and a second callback, compile nothing again."""
    whole = model()
    first = inductor_q.compile(whole)._compiled_call_impl
    assert first is not None and inductor_q.compile(whole)._compiled_call_impl is first
    inductor_q.compile(whole, dynamic=True)
    assert whole._compiled_call_impl not in (first, None)
    base_model(whole).forward = lambda **kwargs: None
    inductor_q.compile(whole)
    assert whole._compiled_call_impl is None
    assert base_model(whole).model._compiled_call_impl is not None


def test_generation_stays_eager_and_copies_are_not_compiled() -> None:
    torch.compiler.reset()
    compiled = inductor_q.compile(model(), dynamic=True)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        cache = compiled(input_ids=ids, use_cache=True, past_key_values=_cache()).past_key_values
    assert cache.get_seq_length() == 4
    assert inductor_q.report(compiled).graphs == 0
    assert copy.deepcopy(compiled)._compiled_call_impl is None


def _cache() -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def test_a_profile_of_chosen_steps(tmp_path: Path) -> None:
    out = tmp_path / "profile"
    steps = (2, 3)
    train(lambda: trainer(tmp_path, max_steps=4), compiled=True, profile=out, profile_steps=steps)
    trace = json.loads((out / "trace.rank0.json").read_text())
    names = [str(event.get("name")) for event in trace["traceEvents"]]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2


@pytest.mark.gpu
def test_gpu_a_profile_has_kernels_and_a_snapshot_of_memory(tmp_path: Path) -> None:
    device, out = torch.device("cuda"), tmp_path / "profile"
    config = testing.tiny_qwen3_config(num_hidden_layers=1, pad_token_id=258)
    net = testing.qlora_model(config, adapter_dtype=torch.bfloat16, device=device)

    def make() -> Any:
        return trainer(tmp_path, net=net, max_steps=4, use_cpu=False)

    train(make, compiled=True, codegen=True, profile=out, profile_steps=(3, 4))
    trace = json.loads((out / "trace.rank0.json").read_text())
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    snapshot = pickle.loads((out / "memory.rank0.pickle").read_bytes())
    [events] = [trace for trace in snapshot["device_traces"] if trace]
    assert snapshot["segments"] and {"alloc", "free_completed"} <= {e["action"] for e in events}
    frames = {frame["name"] for event in events for frame in event.get("frames", ())}
    assert "training_step" in frames  # of transformers' Trainer


@pytest.mark.parametrize("steps", [(), [0, 1], (1.5,), 4])
def test_a_profile_of_no_steps_is_refused(steps: Any, tmp_path: Path) -> None:
    with pytest.raises(NoProfileSteps, match="name the steps to record"):
        QfuseCallback(profile=tmp_path, profile_steps=steps)


def test_a_profile_that_was_not_written_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As when a training resumes behind the steps, or ends before them."""
    profile = StepProfile(tmp_path, (4, 5))
    profile.begin(6)
    profile.end(6)
    profile.end()
    assert "no profile was written: step 4 was not trained" in caplog.text
    assert not list(tmp_path.iterdir())
