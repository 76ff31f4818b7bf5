"""What the tests of the HF Trainer run in worker processes: its own DDP beside wingbeat."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import wingbeat
from helpers.refusals import said_by
from wingbeat.engine.upgrade import engine_of
from wingbeat.integrations.transformers import WingbeatTrainer, WingbeatTrainerMixin
from wingbeat.schedules.events import Phase

CLOSE = 1e-5
MB = 0.002
EXACT = (
    wingbeat.AllReduce(mb=MB),
    wingbeat.DeAR(plan="fixed", mb=MB),
    wingbeat.DeAR(plan="fixed", mb=MB, shard_optimizer=True),
)
WORDS = 32


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


def samples(count: int = 32, lengths: bool = False) -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(1)
    words = [torch.randint(WORDS, (8,), generator=made) for _ in range(count)]
    if lengths:
        words = [each[: 4 + 4 * (n % 2)] for n, each in enumerate(words)]
    return [{"input_ids": each, "labels": each} for each in words]


def arguments(folder: str, kind: Any = TrainingArguments, **options: Any) -> Any:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    usual = {
        "output_dir": folder,
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.02,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "optim": "adamw_torch",
        "logging_steps": 1,
    }
    return kind(**(usual | options))


def made(strategy: Any, model: Any, args: Any, base: Any = Trainer, **options: Any) -> Any:
    """The library's own trainer (None), or wingbeat's."""
    options = {"train_dataset": samples(), "eval_dataset": samples(8)} | options
    if strategy is None:
        return base(model=model, args=args, **options)
    kind = WingbeatTrainer
    if base is not Trainer:
        kind = type("Mixed", (WingbeatTrainerMixin, base), {})
    return kind(model=model, args=args, strategy=strategy, **options)


def flat(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def same(mine: torch.Tensor, theirs: torch.Tensor, why: Any) -> None:
    assert (mine - theirs).abs().max() <= CLOSE, (why, float((mine - theirs).abs().max()))


@contextlib.contextmanager
def clean() -> Iterator[None]:
    try:
        yield
    finally:
        wingbeat.shutdown()


def exact(folder: str) -> None:
    """The same weights and losses as the Trainer's DDP, whatever its arguments."""
    with clean():
        for options in (
            {"lr_scheduler_type": "cosine", "warmup_steps": 1},
            {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
            {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 0.5},
            {
                "bf16": True,
                "activation_checkpointing": True,
                "label_smoothing_factor": 0.1,
                "neftune_noise_alpha": 0.1,
            },
            {"num_train_epochs": 1, "max_steps": -1, "eval_strategy": "steps", "eval_steps": 3},
            {"accelerator_config": {"split_batches": True}, "ddp_find_unused_parameters": False},
        ):
            found: list[Any] = []
            for strategy in (None, *EXACT):
                model = llama()
                trainer = made(strategy, model, arguments(folder, **options))
                norms: list[float] = []
                trainer.add_callback(Noting(norms))
                done = trainer.train()
                loss = trainer.evaluate()["eval_loss"]
                found.append((flat(model), done.training_loss, loss, norms))
                same(found[-1][0], found[0][0], (options, strategy))
                assert abs(found[-1][1] - found[0][1]) <= CLOSE, (options, strategy)
                assert abs(loss - found[0][2]) <= CLOSE, (options, strategy)
                assert norms
                assert max(abs(a - b) for a, b in zip(norms, found[0][3], strict=True)) <= 1e-4


class Noting(TrainerCallback):  # type: ignore[misc]
    """Gradients' norms as the Trainer logs them."""

    def __init__(self, norms: list[float]) -> None:
        self.norms = norms

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.norms.append(float(logs["grad_norm"]))


class Phases(TrainerCallback):  # type: ignore[misc]
    """Whether gradients were still in parts when the Trainer had clipped them."""

    def __init__(self) -> None:
        self.seen: list[Phase] = []

    def on_pre_optimizer_step(self, *_args: Any, model: Any = None, **_kwargs: Any) -> None:
        engine: Any = engine_of(model)
        self.seen.append(engine.phase)


def clips_parts(folder: str) -> None:
    """The Trainer's clipping, and its norm where it does not clip, gather no gradient."""
    with clean():
        for norm in (0.1, 0.0):
            trainer = made(EXACT[1], llama(), arguments(folder, max_grad_norm=norm))
            phases = Phases()
            trainer.add_callback(phases)
            trainer.train()
            # In its first step the Trainer looks at all gradients once, for those of other kinds.
            assert phases.seen[1:] == [Phase.REDUCED] * 3, phases.seen


class Loaded(TrainerCallback):  # type: ignore[misc]
    """This worker's residuals as training begins."""

    def on_train_begin(self, *_args: Any, optimizer: Any = None, **_kwargs: Any) -> None:
        engine: Any = engine_of(optimizer.optimizer)
        self.residuals = engine and engine.compression.state_dict()


def others(folder: str) -> None:
    """Frozen parameters, batches by length, two trainings, prediction, compiled, reentrant."""

    def frozen(strategy: Any) -> torch.Tensor:
        model = llama()
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1" in name)
        made(strategy, model, arguments(folder)).train()
        return flat(model)

    def by_length(strategy: Any) -> torch.Tensor:
        def collate(batch: Any) -> Any:
            words = [each["input_ids"] for each in batch]
            padded = nn.utils.rnn.pad_sequence(words, batch_first=True)
            return {"input_ids": padded, "labels": padded}

        args = arguments(folder, train_sampling_strategy="group_by_length")
        data = samples(lengths=True)
        trainer = made(strategy, llama(), args, train_dataset=data, data_collator=collate)
        trainer.train()
        return flat(trainer.model)

    def twice(strategy: Any) -> torch.Tensor:
        trainer = made(strategy, None, arguments(folder), model_init=llama)
        trainer.train()
        trainer.train()
        first = flat(trainer.model)
        trainer = made(strategy, llama(), arguments(folder))
        trainer.evaluate()
        if strategy is None:  # after an evaluation the Trainer of this release leaves DDP out
            trainer.model._is_accelerate_prepared = False
        trainer.train()
        trainer.train()
        predicted = trainer.predict(samples(8))
        return torch.cat(
            [first, flat(trainer.model), torch.tensor(predicted.predictions).flatten()]
        )

    def compiled(strategy: Any) -> torch.Tensor:
        model = llama()
        args = arguments(folder, torch_compile=True, torch_compile_backend="eager", max_steps=3)
        trainer = made(strategy, model, args)
        trainer.train()
        trainer.save_model(folder)
        return flat(model)

    with clean():
        for train in (frozen, by_length, twice, compiled):
            _as_with_ddp(train)
        _as_with_ddp(functools.partial(_reentrant, folder=folder))


def _as_with_ddp(train: Callable[[Any], torch.Tensor]) -> None:
    wanted = train(None)
    for strategy in EXACT:
        same(train(strategy), wanted, (train, strategy))


def _reentrant(strategy: Any, folder: str) -> torch.Tensor:
    """Train with parts that run a backward of their own inside of backward."""
    kwargs = {"use_reentrant": True}
    args = arguments(folder, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    model = llama()
    made(strategy, model, args).train()
    return flat(model)


def sequences(folder: str) -> None:
    """Seq2SeqTrainer through the mixin, with generated predictions."""

    def train(strategy: Any) -> Any:
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=WORDS,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
        model = T5ForConditionalGeneration(config)
        args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True)
        trainer = made(strategy, model, args, base=Seq2SeqTrainer)
        trainer.train()
        told = trainer.predict(samples(8), max_length=6).predictions
        return flat(model), torch.tensor(told)

    with clean():
        wanted = train(None)
        for strategy in EXACT:
            found = train(strategy)
            same(found[0], wanted[0], strategy)
            assert torch.equal(found[1], wanted[1])


def resumed(folder: str) -> None:
    """A run that is resumed from a checkpoint is the run that was not."""
    sketch = wingbeat.Sketch(bits=2, auto_disable=False)
    strategies = (
        (None, {}),
        *((each, {}) for each in EXACT),
        (wingbeat.AllReduce(mb=MB, compression=sketch), {}),
        (wingbeat.LocalSGD(every=2), {"optim": "sgd"}),
    )
    plain: Any = None
    with clean():
        for number, (strategy, more) in enumerate(strategies):
            home = f"{folder}/{number}"
            options = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.0} | more
            first = made(strategy, llama(), arguments(home, **options))
            first.train()
            wanted = flat(first.model)
            again = made(strategy, llama(), arguments(home, **options))
            loaded = Loaded()
            again.add_callback(loaded)
            again.train(resume_from_checkpoint=f"{home}/checkpoint-2")
            if number == 4:  # the order of buckets is found anew, and a code depends on the bucket
                rank = dist.get_rank()
                kept = torch.load(f"{home}/checkpoint-2/wingbeat_residuals_0_{rank}_of_2.pt")
                for name, value in kept["residuals"].items():
                    assert torch.equal(loaded.residuals["residuals"][name], value)
                assert (flat(again.model) - wanted).abs().max() < 0.03
            else:
                assert torch.equal(flat(again.model), wanted), (strategy, "resumed")
            plain = wanted if plain is None else plain
            if strategy in EXACT:
                same(wanted, plain, strategy)
            size = dist.get_world_size() if number == 4 else 0
            assert len([*Path(f"{home}/checkpoint-2").glob("wingbeat_*")]) == size
            config = json.loads(Path(f"{home}/checkpoint-2/config.json").read_text())
            assert config["architectures"] == ["LlamaForCausalLM"]
        # A checkpoint of DDP is one for wingbeat, and the other way round.
        for here, there in ((EXACT[2], 0), (None, 3), (EXACT[1], 4)):
            options = {"save_strategy": "no", "max_grad_norm": 0.0}
            again = made(here, llama(), arguments(folder, **options))
            again.train(resume_from_checkpoint=f"{folder}/{there}/checkpoint-2")
            if there != 4:
                same(flat(again.model), plain, (here, there))


def best(folder: str) -> None:
    """The best model is loaded at the end; saved by all ranks, or by rank 0 alone."""

    def train(strategy: Any, home: str) -> torch.Tensor:
        args = arguments(
            home,
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=1,
            eval_steps=1,
            learning_rate=3.0,
            load_best_model_at_end=True,
            save_total_limit=2,
        )
        trainer = made(strategy, llama(), args)
        trainer.train()
        assert trainer.state.best_global_step < 4
        trainer.save_model(f"{home}/all")
        if dist.get_rank() == 0:
            trainer.save_model(f"{home}/one")
            again = LlamaForCausalLM.from_pretrained(f"{home}/one")
            assert torch.equal(flat(again), flat(trainer.model))
        dist.barrier()
        assert Path(f"{home}/all/model.safetensors").exists()
        return flat(trainer.model)

    with clean():
        wanted = train(None, f"{folder}/ddp")
        for number, strategy in enumerate(EXACT):
            same(train(strategy, f"{folder}/{number}"), wanted, strategy)


def stopped(folder: str) -> None:
    """Evaluation before the first step, an optimizer of the library's own, and an early end."""

    def train(strategy: Any) -> Any:
        args = arguments(
            folder,
            optim="adafactor",
            eval_on_start=True,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            max_steps=9,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
        )
        # No loss is that much better than the first.
        stopping = EarlyStoppingCallback(2, early_stopping_threshold=10.0)
        trainer = made(strategy, llama(), args, callbacks=[stopping])
        trainer.train()
        losses = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        return flat(trainer.model), trainer.state.global_step, losses

    with clean():
        wanted = train(None)
        assert wanted[1] < 9
        for strategy in EXACT[:3]:
            found = train(strategy)
            same(found[0], wanted[0], strategy)
            assert found[1] == wanted[1]
            assert max(abs(a - b) for a, b in zip(found[2], wanted[2], strict=True)) <= 1e-4


def averaged(folder: str) -> None:
    """Models that differ while they train are one when evaluated, saved, and at the end."""
    with clean():
        for strategy in (wingbeat.LocalSGD(every=3), wingbeat.DiLoCo(every=3)):
            args = arguments(
                folder, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2
            )
            trainer = made(strategy, llama(), args)
            trainer.train()
            mine = flat(trainer.model)
            everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, mine)
            assert all(torch.equal(each, mine) for each in everyone), strategy


def in_half(folder: str) -> None:
    """``bf16_full_eval`` converts the model after training, which ends that."""
    with clean():
        trainer = made(EXACT[1], llama(), arguments(folder, bf16_full_eval=True))
        trainer.train()
        trainer.evaluate()
        assert engine_of(trainer.model) is None
        assert next(trainer.model.parameters()).dtype == torch.bfloat16


def refusals(folder: str) -> list[str]:
    """What each misuse says."""

    def gpus() -> Any:
        args = arguments(folder)
        args._n_gpu = 2
        args.__class__ = type("Args", (type(args),), {"n_gpu": 2})
        return made(EXACT[0], llama(), args)

    def moved() -> Any:
        before = Trainer._save_checkpoint
        del Trainer._save_checkpoint
        try:
            return made(EXACT[0], llama(), arguments(folder))
        finally:
            Trainer._save_checkpoint = before

    def elsewhere() -> Any:
        before = Trainer._prepare_for_training
        Trainer._prepare_for_training = lambda self, *_args: (self.model, _args[1])
        try:
            return made(EXACT[0], llama(), arguments(folder)).train()
        finally:
            Trainer._prepare_for_training = before

    cases = [
        lambda: made(wingbeat.DeAR, llama(), arguments(folder)),
        lambda: made("dear", llama(), arguments(folder)),
        gpus,
        moved,
        elsewhere,
        lambda: made(EXACT[0], llama(), arguments(folder, ddp_broadcast_buffers=False)).train(),
    ]
    with clean():
        return said_by(cases)
