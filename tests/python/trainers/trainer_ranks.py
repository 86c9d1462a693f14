"""What test_trainers.py runs on two ranks: blocks of the guides, and loaders that accelerate has prepared."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from knapformer import ArgumentError, BalancedBatchSampler, BalancedLoader, SequenceBalancer

LENGTHS = [40, 7, 64, 5, 9, 30, 300, 12] * 12


def _as_launched(rank: int, world: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(ACCELERATE_USE_CPU="true", NODE_RANK="0")
    os.chdir(folder)
    torch.set_default_dtype(torch.float64)


def _run(rank: int, world: int, folder: Path, *blocks: str) -> dict[str, Any]:
    _as_launched(rank, world, folder)  # each time: Lightning deletes some of it
    namespace: dict[str, Any] = {}
    for block in blocks:
        torch.manual_seed(0)
        exec(compile(block, "a guide's block", "exec"), namespace)
    return namespace


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as raised:
        error = raised
        while isinstance(error.__context__, Exception) and not isinstance(error, ArgumentError):
            error = error.__context__  # Lightning may raise another one as it cleans up
        return f"{type(error).__name__}: {error}"
    return "no error"


def accelerated(rank: int, world: int, folder: Path, block: str) -> tuple[dict[str, Tensor], list[str]]:
    """The weights that the guide's loop trains, and the message where it does not say what divides the loss."""
    run = partial(_run, rank, world, folder)
    unsaid = _message(lambda: run(block.replace(", loss_divisor=divisor", "")))
    by_hand = block.replace("accelerator.backward(loss)", "loss.backward()").replace("divisor = ", "divisor = 1 or ")
    weights = {name: run(code)["model"].module.weight for name, code in (("as told", block), ("by hand", by_hand))}
    return weights, [unsaid]


def others(rank: int, world: int, folder: Path, blocks: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    """As accelerated, with Lightning and with transformers' Trainer, the latter also from a checkpoint on."""
    data, lightning, transformers = blocks
    run = partial(_run, rank, world, folder, data)
    weights = {"lightning": run(lightning)["model"].model.weight}
    told = run(transformers)
    weights["transformers"] = told["trainer"].model.weight
    resumed = told["BalancedTrainer"](torch.nn.Linear(16, 16), told["arguments"], train_dataset=told["dataset"])
    resumed.train(resume_from_checkpoint="out/checkpoint-4")  # amid the second of two epochs of three steps
    weights["resumed"] = resumed.model.weight
    unsaid = [block.replace(", loss_divisor=divisor", "") for block in (lightning, transformers)]
    dealt_again = lightning.replace("use_distributed_sampler=False", "use_distributed_sampler=True")
    said = [_message(partial(run, block)) for block in (*unsaid, dealt_again)]
    as_sampler = data.replace("batch_sampler=sampler", "sampler=sampler, batch_size=None")
    return weights, [*said, _message(partial(_run, rank, world, folder, as_sampler, dealt_again))]


def _accelerator(num_steps: int = 1, **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(gradient_accumulation_steps=num_steps, dataloader_config=DataLoaderConfiguration(**options))


def _loader(sampler: BalancedBatchSampler) -> DataLoader[Any]:
    return DataLoader(range(96), batch_sampler=sampler, collate_fn=list)


def _sampler(**options: Any) -> BalancedBatchSampler:
    return BalancedBatchSampler(LENGTHS, **{"batch_size": 4, "d_model": 16, "micro_batches": 2} | options)


def prepared(rank: int, world: int, folder: Path, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists of loaders that accelerate has prepared, of two epochs for each of the cases."""
    _as_launched(rank, world, folder)
    own = _sampler()
    plain = []
    for epoch in range(4):
        own.set_epoch(epoch)
        plain.append(list(own))
    seen: dict[str, Any] = {"plain": plain}

    from accelerate import accelerator as module
    from accelerate.data_loader import prepare_data_loader

    sampler = _sampler()
    module.prepare_data_loader = prepare_data_loader  # as if accelerate had been imported after the line above
    late = _message(lambda: list(_accelerator().prepare(_loader(sampler))))

    for case in cases:
        loader = _accelerator(**case).prepare(_loader(_sampler()))
        assert len(loader) == len(plain[0])
        seen[str(case)] = [list(loader), list(loader)]

    accelerator = _accelerator()
    loader = accelerator.prepare(_loader(_sampler()))
    list(loader)
    seen["skipped"] = list(accelerator.skip_first_batches(loader, 3))
    seen["skipped, then prepared"] = list(accelerator.prepare(accelerator.skip_first_batches(_loader(_sampler()), 3)))

    # A run that goes on amid epoch 2.
    own.set_epoch(2)
    list(islice(own, 5))
    state = own.state_dict()
    sampler = _sampler()
    loader = accelerator.prepare(_loader(sampler))
    sampler.load_state_dict(state)
    seen["epoch not told"] = _message(lambda: list(loader))
    seen["resumed"] = []
    for epoch in (2, 3):
        loader.set_epoch(epoch)
        seen["resumed"].append(list(loader))

    seen["errors"] = [
        late,
        _message(lambda: accelerator.prepare(_loader(_sampler(num_replicas=1, rank=0)))),
        _message(lambda: accelerator.prepare(DataLoader(range(96), sampler=_sampler(), batch_size=None))),
        _message(lambda: _accelerator(num_steps=4).prepare(_loader(_sampler()))),
        _message(lambda: BalancedLoader(loader, SequenceBalancer(d_model=16), seq_lens=list, empty=list)),
    ]
    return seen
