"""Each error as the user sees it: text, attributes, builtin base, pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import traceback

import pytest

from inductor_q import exc

# One row a class: the error, its whole text, the builtin that a caller would catch.
CASES: list[tuple[exc.QfuseError, str, type[Exception]]] = [
    (
        exc.UnknownOption(name="shape_paddin", known=("shape_padding", "debug")),
        "unknown option 'shape_paddin'; did you mean 'shape_padding'? "
        "List all: inductor_q.list_options()",
        KeyError,
    ),
    (
        exc.NoOption(name="max_autotnue", known=("max_autotune",)),
        "no option's name contains 'max_autotnue'; did you mean 'max_autotune'? "
        "List all: qfuse options --all",
        KeyError,
    ),
    (
        exc.UnknownCommand(name="explan", known=("explain", "run")),
        "unknown command 'explan'; did you mean 'explain'? Known: explain, run",
        KeyError,
    ),
    (
        exc.UnknownMode(name="fastest", known=("default", "max-autotune")),
        "unknown mode 'fastest'. Known: default, max-autotune",
        ValueError,
    ),
    (
        exc.UnknownPreset(
            name="sm90", known=("sm_90", "cpu"), source="environment variable QFUSE_PRESET"
        ),
        "unknown preset 'sm90' in environment variable QFUSE_PRESET; did you mean 'sm_90'? "
        "Known: auto, none, sm_90, cpu",
        KeyError,
    ),
    (
        exc.BaseFailed(problem="exit status 1: OSError: no such file"),
        "the preset that ships gives no measurement: exit status 1: OSError: no such file. "
        "Run the model by itself first",
        RuntimeError,
    ),
    (
        exc.UnreadablePreset(path="/c/cpu.json", problem="it has no 'base'"),
        "/c/cpu.json: it has no 'base'. Remove it, or write it again with qfuse tune",
        ValueError,
    ),
    (
        exc.UnusableRuns(path="/c/tune.jsonl", problem="Is a directory"),
        "the runs of qfuse tune in /c/tune.jsonl: Is a directory. Move away what is in the way, or "
        "set XDG_CONFIG_HOME to a folder that can be written to",
        OSError,
    ),
    (
        exc.UnknownPass(name="fold_loras", known=("canonicalize", "fold_lora")),
        "unknown pass 'fold_loras'; did you mean 'fold_lora'? "
        "Known, in order: canonicalize, fold_lora",
        KeyError,
    ),
    (
        exc.UnknownProvider(name="tritn", op="dequantize", known=("triton", "eager")),
        "no provider 'tritn' of qfuse::dequantize; did you mean 'triton'? "
        "Known: auto, triton, eager",
        KeyError,
    ),
    (
        exc.UnknownBackend(name="inductr", known=("eager", "inductor")),
        "unknown backend 'inductr'; did you mean 'inductor'? Known: eager, inductor",
        KeyError,
    ),
    (
        exc.UnknownOp(name="linaer", known=("dequantize", "linear")),
        "unknown op 'linaer'; did you mean 'linear'? Known: dequantize, linear",
        KeyError,
    ),
    (
        exc.PackedForInference(layers=("q", "k", "v", "o")),
        "bitsandbytes has packed q, k, v, and 1 more for inference on this CPU, so what comes "
        "before would get no gradient. Call inductor_q.integrations.keep_unpacked(model), which "
        "unpacks the weights; best before the first evaluation",
        RuntimeError,
    ),
    (
        exc.NoRegion(model="Net"),
        "Net names no layers that could be compiled by themselves (_no_split_modules); "
        'compile it with regions="model".',
        ValueError,
    ),
    (
        exc.NoProfileSteps(given=()),
        "profile_steps is (): name the steps to record, from 1 on, such as (4, 5)",
        ValueError,
    ),
    (
        exc.OptionsWithoutCompile(given=("options", "mode")),
        "QfuseCallback has options, mode and enabled=False, so nothing would use them; "
        'drop them, or set enabled=True or enabled="auto".',
        ValueError,
    ),
    (
        exc.UnusableCaches(path="caches.tar.gz", problem="it has no fingerprint"),
        "caches in caches.tar.gz: it has no fingerprint",
        ValueError,
    ),
    (
        exc.UnknownTarget(target="trian.py", problem="no such file"),
        "cannot run 'trian.py': no such file. Give a script, -m module, package.module:callable or "
        "a pytest node (tests/test_x.py::test_y)",
        ValueError,
    ),
    (
        exc.InvalidInputs(factory="model:inputs", got="list"),
        "model:inputs returned a list. Return a tuple of arguments, or a pair of a tuple and a "
        "dict of keywords",
        TypeError,
    ),
    (
        exc.UnknownFormat(name="nf5", known=("nf4", "fp4")),
        "no quantization format 'nf5'; did you mean 'nf4'? Known: nf4, fp4",
        KeyError,
    ),
    (
        exc.UnknownAbsmax(name="e4m3", known=("e4m4", "fp16")),
        "no absmax of k-bit blocks is called 'e4m3'; did you mean 'e4m4'? Known: e4m4, fp16",
        KeyError,
    ),
    (
        exc.UnknownLayer(name="lm_haed", known=("up", "lm_head"), source="skip"),
        "no linear layer matches 'lm_haed' in skip; did you mean 'lm_head'? Known: up, lm_head",
        KeyError,
    ),
    (
        exc.NotNames(argument="skip", value="lm_head"),
        "skip is the text 'lm_head', expected several names: skip=['lm_head']",
        TypeError,
    ),
    (
        exc.UnknownProjection(name="down", known=("gate_up_proj", "down_proj"), source="targets"),
        "unknown projection of experts 'down' in targets; did you mean 'down_proj'? "
        "Known: gate_up_proj, down_proj",
        KeyError,
    ),
    (
        exc.CorruptAdapter(path="adapter", problem="lora_A is missing"),
        "adapter: lora_A is missing",
        ValueError,
    ),
    (
        exc.StillMerged(what="layers.0.mlp.experts.down_proj", asked="add_lora"),
        "add_lora expects the adapter of layers.0.mlp.experts.down_proj beside its weight, but it "
        "is merged, and would stay in there for good. Call unmerge_adapter() of PEFT's model first",
        ValueError,
    ),
    (
        exc.AdaptedByPeft(what="layers.0.mlp.experts.down_proj", asked="quantize"),
        "quantize would replace layers.0.mlp.experts.down_proj, which has an adapter of PEFT's "
        '(target_parameters, or target_modules="all-linear"). Call it before get_peft_model(), '
        "with a LoraConfig that names other modules; or keep PEFT's adapters and call "
        "experts.use_qfuse(model) instead",
        ValueError,
    ),
    (
        exc.AlreadyAdapted(what="layers.0.mlp.experts.down_proj"),
        "layers.0.mlp.experts.down_proj has an adapter already, which a new one would discard. "
        "Train the parameters lora_A and lora_B that it has, give other targets, or make the model "
        "anew; load_adapter replaces adapters by saved ones",
        ValueError,
    ),
    (
        exc.CannotSave(
            what="layers.0.up.weight",
            problem="Linear4bit keeps more than tensors",
            remedy="Save the model as its library does: save_pretrained, torch.save",
        ),
        "layers.0.up.weight cannot be saved in this way: Linear4bit keeps more than tensors. "
        "Save the model as its library does: save_pretrained, torch.save",
        ValueError,
    ),
    (
        exc.NoExperts(model="LlamaForCausalLM"),
        "LlamaForCausalLM has no experts behind transformers' experts interface, which is what is "
        "known: transformers >= 5 and a model such as Qwen3-MoE, Mixtral, OLMoE or gpt-oss (not "
        "Llama 4). "
        "Where its checkpoint is packed (gpt-oss in MXFP4), inductor_q.load_checkpoint loads it",
        ValueError,
    ),
    (
        exc.UnreadWeight(kind="Int4OpaqueTensor", reason="only a kernel knows its layout"),
        "cannot decode Int4OpaqueTensor: only a kernel knows its layout. Ask its library for the "
        "values, or quantize the original weight by inductor_q.quantize, whose formats are all "
        "read",
        ValueError,
    ),
    (
        exc.UnreadExperts(what="mlp.experts", found="down_proj: it is swizzled"),
        "cannot take over mlp.experts as it is packed: expected blocks and scales as they lie on "
        "disk, found down_proj: it is swizzled. Make the model anew under "
        "inductor_q.kbit.meta_parameters() and load its checkpoint with "
        "inductor_q.load_checkpoint, which keeps it packed; or load it in 16 bits, by "
        "from_pretrained with Mxfp4Config(dequantize=True) or "
        "FineGrainedFP8Config(dequantize=True)",
        ValueError,
    ),
    (
        exc.CannotShard(what="mlp.experts", problem="8 experts are no multiple of 3 ranks"),
        "cannot shard the experts of mlp.experts: 8 experts are no multiple of 3 ranks",
        ValueError,
    ),
    (
        exc.CannotMerge(what="a FP8Linear", problem="it has blocks of (64, 64)", remedy="Decode."),
        "cannot merge an adapter into a FP8Linear: it has blocks of (64, 64). Decode.",
        ValueError,
    ),
    (
        exc.OneBackward(),
        "a loss in chunks has no gradient of its gradient, which create_graph=True asks for. "
        "Compile the model with options={'qfuse.loss': 'whole'}, which keeps the logits",
        NotImplementedError,
    ),
    (
        exc.ReplicatedModel(gpus=2),
        "2 GPUs are visible to one process, so the trainer would wrap the model in "
        "nn.DataParallel, whose replicas cannot be compiled. Start a process for each GPU: "
        "torchrun --nproc-per-node 2 train.py; or set CUDA_VISIBLE_DEVICES=0",
        ValueError,
    ),
    (
        exc.NormOfOneRank(value=1.0),
        "max_grad_norm=1.0 clips each rank by the norm of its own experts, so that what the ranks "
        "have in common drifts apart. Set max_grad_norm=0.0, or train in a loop of your own with "
        "inductor_q.experts.clip_grad_norm_",
        ValueError,
    ),
    (
        exc.NothingToQuantize(model="Net", found="it has no nn.Linear"),
        "nothing to quantize in Net: it has no nn.Linear",
        ValueError,
    ),
    (
        exc.NotAModule(call="inductor_q.compile", found="str"),
        "inductor_q.compile takes a torch.nn.Module and compiles it in place, and got a str. "
        'Compile a function by torch.compile(function, backend="qfuse")',
        TypeError,
    ),
    (
        exc.NotATrainer(found="str"),
        "compile_trainer takes a Trainer of transformers, or one that is made of it as TRL's are, "
        "and got a str. In a loop of your own call inductor_q.compile(model)",
        TypeError,
    ),
    (
        exc.UnknownRegions(name="layer", known=("auto", "model", "layers")),
        "unknown regions 'layer'; did you mean 'layers'? Known: auto, model, layers",
        ValueError,
    ),
    (
        exc.NotAModel(found="dict"),
        "cannot quantize a dict: expected a torch.nn.Module, or transformers' configuration of a "
        "causal language model beside checkpoint=...",
        TypeError,
    ),
    (
        exc.WrongScheme(asked={"gguf": {}}, problem="'gguf' is none of bnb, kbit"),
        "cannot quantize to {'gguf': {}}: 'gguf' is none of bnb, kbit",
        ValueError,
    ),
    (
        exc.AlreadyQuantized(what="experts.up_proj", found="it holds torch.uint8", remedy="Load."),
        "experts.up_proj is quantized already: it holds torch.uint8. Load.",
        ValueError,
    ),
    (
        exc.InvalidOptionValue(name="shape_padding", value="yes", expected="True or False"),
        "option 'shape_padding': 'yes' is not True or False. Drop the option to keep the default",
        TypeError,
    ),
    (
        exc.ModeConflict(argument="max-autotune", option="default"),
        "torch.compile(mode='max-autotune') and options={'qfuse.mode': 'default'} differ; "
        "give one of them (only 'qfuse.mode' goes together with other options)",
        ValueError,
    ),
    (
        exc.NotFused(sites=(("layers.0.q_proj", "dropout between A and B"),)),
        "1 quantized site not fused:\n  layers.0.q_proj: dropout between A and B\n"
        "Mend what the reasons name, or set options={'qfuse.strict': False} to run them unfused",
        RuntimeError,
    ),
    (
        exc.UnwritableOutput(option="--json", path="/proc/a.json", problem="Permission denied"),
        "--json /proc/a.json cannot be written: Permission denied. Nothing was run",
        OSError,
    ),
    (
        exc.ClosedOutput(),
        "standard output is closed. Send it somewhere, such as > /dev/null",
        OSError,
    ),
    (
        exc.NotAReport(path="a.json", problem="it has no schema_version"),
        "a.json is not a report: it has no schema_version. "
        "Write one with: qfuse explain --json FILE TARGET",
        ValueError,
    ),
    (
        exc.UnknownReportVersion(path="a.json", version=7, known=1),
        "a.json has schema_version 7, this qfuse reads 1. "
        "Write it again with this version: qfuse explain --json FILE TARGET",
        ValueError,
    ),
    (
        exc.CorruptQuantState(
            what="absmax of q_proj",
            expected="256 values",
            got="255",
            remedy="Load the weight again",
        ),
        "corrupt quantization state: absmax of q_proj should be 256 values, is 255. "
        "Load the weight again",
        ValueError,
    ),
    (
        exc.UnsupportedBlocksize(blocksize=48, supported=(32, 64)),
        "blocksize 48 is not supported. Quantize again with one of 32, 64",
        ValueError,
    ),
    (
        exc.NoQuantizer(name="hqq4_g64", what="linear layers", known=("nf4_b64", "kbit4_e4m4")),
        "hqq4_g64 is a format to read; nothing here quantizes linear layers to it. "
        "Quantize to nf4_b64, kbit4_e4m4",
        ValueError,
    ),
    (
        exc.UnsupportedBits(k=6, supported=(2, 3, 4, 5)),
        "k=6 bits are not supported. Quantize with one of 2, 3, 4, 5",
        ValueError,
    ),
    (
        exc.WrongCodebook(k=3, problem="its shape is (16,)"),
        "codebook of k=3: its shape is (16,). It takes 8 finite float32 values in ascending order "
        "(duplicates are allowed)",
        ValueError,
    ),
    (
        exc.NoValues(what="weight of lm_head"),
        "weight of lm_head is on the meta device, so it has no values to quantize. Give "
        "checkpoint=..., from which weights are read one at a time, or load the model before, such "
        "as by inductor_q.load_checkpoint",
        ValueError,
    ),
    (
        exc.NotFinite(what="weight of q_proj"),
        "weight of q_proj contains NaN or infinity. Repair it, or leave it out with skip=[...]",
        ValueError,
    ),
    (
        exc.ScaleOutOfRange(what="weight of q", value=40.0, absmax="e4m4", low=2**-10, high=31.0),
        "weight of q reaches 40, outside of the 0.000977 to 31 that absmax='e4m4' scales hold in "
        "full precision. Use another absmax, or scale the tensor",
        ValueError,
    ),
    (
        exc.WrongBudget(bits=2.0, low=2.25, high=5.25),
        "a budget of 2 bits an element is not between 2.25 and 5.25",
        ValueError,
    ),
    (
        exc.WrongCheckpoint(path="m.safetensors", problems=("a is not in it", "b is not in it")),
        "m.safetensors does not fit the model, which was left as it was:\n"
        "  a is not in it\n  b is not in it",
        ValueError,
    ),
    (
        exc.NotAModelFactory(name="app:model", problem="it takes an argument"),
        "'app:model' is no model factory: it takes an argument. "
        "Give package.module:function, a function without arguments that returns the model",
        ValueError,
    ),
    (
        exc.WrongDevice(what="absmax", expected="cuda:0", got="cpu"),
        "absmax is on cpu, expected cuda:0. Move it with .to(...)",
        ValueError,
    ),
    (
        exc.WrongDtype(what="absmax", expected="float32", got="int64"),
        "absmax is int64, expected float32. Cast it with .to(...)",
        TypeError,
    ),
    (
        exc.WrongShape(what="absmax", expected=(256,), got=(255,)),
        "absmax has shape (255,), expected (256,). Check which weight the operands belong to",
        ValueError,
    ),
    (
        exc.UnreadCheckpoint(path="model", problem="quant_method 'quark' has no reader"),
        "model is not loaded as it is: quant_method 'quark' has no reader",
        ValueError,
    ),
    (
        exc.UnreadableLogits(problem="the head was changed"),
        "the head was changed. The loss of this model is computed in chunks, and its logits when "
        "they are read: read them before optimizer.step(), or compile the model with "
        "options={'qfuse.loss': 'whole'}, which keeps them",
        RuntimeError,
    ),
    (
        exc.MissingExtra(package="bitsandbytes", extra="bnb", feature="an NF4 model"),
        "an NF4 model needs bitsandbytes, which is not installed: pip install 'inductor-q[bnb]'",
        ImportError,
    ),
]


@pytest.mark.parametrize(("error", "text", "builtin"), CASES, ids=lambda x: type(x).__name__)
def test_error(error: exc.QfuseError, text: str, builtin: type[Exception]) -> None:
    assert str(error) == text
    assert error.args == (text,)
    assert isinstance(error, builtin)
    # What a traceback shows, also for the KeyError family.
    assert traceback.format_exception_only(type(error), error)[0].startswith(
        f"{type(error).__module__}.{type(error).__name__}: {text.splitlines()[0]}"
    )
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == text
        assert twin.__dict__ == error.__dict__


def test_every_class_has_a_row() -> None:
    public = {
        cls
        for name, cls in vars(exc).items()
        if inspect.isclass(cls)
        and issubclass(cls, exc.QfuseError)
        and cls is not exc.QfuseError
        and not name.startswith("_")
    }
    assert {type(error) for error, _, _ in CASES} == public


def test_fields_are_keyword_only_and_checked() -> None:
    with pytest.raises(TypeError):
        exc.UnknownFormat("nf5", ("nf4",))  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError):
        exc.UnknownFormat(name="nf5")  # type: ignore[call-arg]


def test_fields_are_attributes() -> None:
    error = exc.UnsupportedBlocksize(blocksize=48, supported=(32, 64))
    assert (error.blocksize, error.supported) == (48, (32, 64))


def test_not_fused_lists_every_site() -> None:
    text = str(exc.NotFused(sites=(("a", "first"), ("b", "second"))))
    assert text.startswith("2 quantized sites not fused:\n  a: first\n  b: second\n")


def test_long_lists_are_cut() -> None:
    many = [f"layer {i}" for i in range(15)]
    text = str(exc.WrongCheckpoint(path="m", problems=many))
    assert text.splitlines()[1:] == [f"  layer {i}" for i in range(12)] + ["  and 3 more"]
