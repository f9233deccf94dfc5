"""Train a small Qwen3 MoE whose experts get LoRA by PEFT's `target_parameters`."""

from typing import Any

import peft
import torch
import transformers

from inductor_q import testing


def main() -> None:
    torch.manual_seed(0)
    from_config: Any = transformers.AutoModelForCausalLM.from_config
    base = from_config(testing.tiny_qwen3_moe_config(), dtype=torch.bfloat16)
    lora = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model = peft.get_peft_model(base, lora)
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        ids = torch.arange(step, step + 32).reshape(2, 16)
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        print(f"step {step} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
