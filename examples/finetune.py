"""Train a small Llama on the standard library's sources with the HF Trainer and wingbeat.

torchrun --nproc-per-node 2 examples/finetune.py dear
wingbeat lab run star:2@50mbit -- python examples/finetune.py dear:compression=sketch

The strategy is spelled as on the command line; ``ddp`` is the Trainer's own. Nothing is downloaded:
the model is made from a config, and its words are the bytes of Python's own modules.
"""

import importlib.util
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from wingbeat.integrations.transformers import WingbeatTrainer
from wingbeat.strategies import parse

LENGTH = 128
MODULES = [
    "argparse",
    "difflib",
    "doctest",
    "inspect",
    "pickle",
    "shutil",
    "tarfile",
    "typing",
    "zipfile",
    "turtle",
]


def sources() -> torch.Tensor:
    """The modules' bytes in windows of 128, in an order that is the same on every worker."""
    found = bytearray()
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        found += Path(spec.origin).read_bytes()
    windows = torch.frombuffer(found, dtype=torch.uint8)[: len(found) // LENGTH * LENGTH]
    windows = windows.view(-1, LENGTH).long()
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
        )
    )


def trainer(strategy: str, folder: str, steps: int) -> Trainer:
    data = [{"input_ids": each, "labels": each} for each in sources()]
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    options = {"model": network(), "args": args}
    options |= {"train_dataset": data[256:], "eval_dataset": data[:256]}
    if strategy == "ddp":
        return Trainer(**options)
    return WingbeatTrainer(**options, strategy=parse(strategy))


def main() -> None:
    strategy = sys.argv[1] if len(sys.argv) > 1 else "dear"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        training = trainer(strategy, folder, steps)
        taken = training.train().metrics["train_runtime"]
        loss = training.evaluate()["eval_loss"]
    if os.environ.get("RANK", "0") == "0":
        print(f"{strategy}: {taken / steps * 1e3:.0f} ms a step, held-out loss {loss:.3f}")


if __name__ == "__main__":
    main()
