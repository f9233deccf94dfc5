"""What the examples with trainers share: a model in NF4, its tokenizer, and paragraphs to train on.

`--model` takes a name of the Hub or a folder. "toy" and "8b" are models with random weights, made
here: one that a CPU trains in seconds, and eight layers of Qwen3-8B's shapes for a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from examples.finetune import TEXT
from inductor_q.integrations import local_device_map
from inductor_q.testing import qwen3_8b_config, tiny_qwen3_config

SIZES = {"toy": tiny_qwen3_config, "8b": qwen3_8b_config}
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"


def parser(what: str | None) -> argparse.ArgumentParser:
    """Make the options that all examples have."""
    made = argparse.ArgumentParser(description=what)
    made.add_argument("--model", default="toy", help="toy, 8b, or a name or folder of a model")
    made.add_argument("--steps", type=int, default=10)
    made.add_argument("--length", type=int, default=256, help="the most tokens of a sequence")
    made.add_argument("--data", type=Path, default=TEXT, help="a text, cut into its paragraphs")
    made.add_argument("--pad", type=int, help="pad lengths to a multiple of this, so they are few")
    made.add_argument("--output", default=tempfile.gettempdir() + "/inductor-q-example")
    made.add_argument("--profile", help="a folder for a trace of two steps")
    return made


def load(name: str) -> tuple[Any, Any]:
    """Return the model in NF4 on this process's device, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    nf4: Any = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), SIZES[name]()) if name in SIZES else name
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, quantization_config=nf4, device_map=local_device_map()
        )
        return model, AutoTokenizer.from_pretrained(path)


def paragraphs(data: Path) -> list[str]:
    """Return the paragraphs of a text."""
    return [" ".join(part.split()) for part in data.read_text("utf-8").split("\n\n") if part]


def make_checkpoint(folder: Path, config: Any) -> str:
    """Save a model with random weights and a tokenizer of bytes, and return its folder."""
    from transformers import AutoModelForCausalLM

    tokenizer = byte_tokenizer()
    config.update({"pad_token_id": tokenizer.pad_token_id, "dtype": "bfloat16"})
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def byte_tokenizer() -> Any:
    """Make a tokenizer whose tokens are the bytes of UTF-8."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {"<s>": 256, "</s>": 257, "<pad>": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    return tokenizer
