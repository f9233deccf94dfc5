"""Fine-tune a small Llama: NF4 of bitsandbytes, LoRA of PEFT, any backend of torch.compile.

`--backend graphs` is Inductor up to its last graphs, which then run as they are: no code is
generated, so it takes seconds where C++ would take a minute.
"""

import argparse
import sys
from typing import Any

import torch

from inductor_q import testing


def graphs(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def run(gm: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Any:
        def boxed(arguments: list[Any]) -> Any:
            return gm.forward(*arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    with config.patch(enable_autograd_cache=False):
        return compile_fx(gm, example_inputs, inner_compile=run)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    backend: Any = {"graphs": graphs, "qfuse": testing.qfuse_backend()}.get(
        args.backend, args.backend
    )

    config = testing.tiny_llama_config()
    model = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(testing.adapter_parameters(model), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        length = 32 if step < 2 else 48  # a second length: one recompile, for dynamic shapes
        ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.3f}")
    print("argv", sys.argv[1:])


if __name__ == "__main__":
    main()
