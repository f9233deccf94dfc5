"""Time what trainers call between forwards: walks over all modules of a model, on the host.

``trainer`` is the model as transformers and PEFT have it, ``qfuse`` the same under
``QfuseCallback``. transformers' Trainer calls ``model.train()`` and ``model.num_parameters()`` for
each batch, and lists all parameters to clip gradients and to drop them. TRL's trainers with a
reference pass (DPO, KTO, GRPO) disable the adapters and gradient checkpointing around it. There
``QfuseCallback`` adds a walk of its own, since what TRL enables again has to be prepared again, and
one for each of the two states that the model enters.

The model is small in all but its layers, and on the CPU: how large a weight is costs no walk time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import inductor_q
from benchmarks import harness
from inductor_q import testing
from inductor_q.integrations.states import states_of
from inductor_q.integrations.walks import spare_walks

PEERS = ("trainer", "qfuse")


def main(argv: Sequence[str] | None = None) -> harness.Suite:
    parser = harness.parser(__doc__, peers=PEERS)
    parser.add_argument("--layers", type=int, nargs="+", help="default: 8 36, quick: 1")
    arguments = parser.parse_args(argv)
    suite = harness.start("bench_walks", arguments)
    rounds = arguments.rounds or (3 if arguments.quick else 30)
    for layers in arguments.layers or ([1] if arguments.quick else [8, 36]):
        calls = {peer: _calls(_model(layers, peer)) for peer in arguments.backends}
        for name in next(iter(calls.values())):
            timings = harness.time_steps(
                {peer: known[name] for peer, known in calls.items()},
                torch.device("cpu"),
                rounds=rounds,
            )
            suite.add({"layers": layers, "call": name}, timings)
    harness.finish(suite, arguments)
    return suite


def _model(layers: int, peer: str) -> Any:
    config = testing.tiny_qwen3_config(num_hidden_layers=layers)
    model: Any = testing.qlora_model(config, adapter_dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    if peer == "qfuse":
        inductor_q.compile(model)
        spare_walks(model)
    return model


def _calls(model: Any) -> dict[str, Callable[[], object]]:
    states = list(states_of(model))

    def enter() -> None:
        for each in states:
            each.follow()

    def reference() -> None:
        with warnings.catch_warnings():  # a name that transformers will drop, and TRL still calls
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_disable()
            with model.disable_adapter():
                enter()
            model.gradient_checkpointing_enable()
        enter()

    return {
        "train": model.train,
        "num_parameters": model.num_parameters,
        "parameters": lambda: list(model.parameters()),
        "zero_grad": model.zero_grad,
        "reference pass": reference,
    }


if __name__ == "__main__":
    main()
