"""What other packages' training loops do to the lists of a batch sampler and to a loss. Imports none of them."""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from knapformer._core import ArgumentError, StateError

# What divides a loss, by the module that is imported where a program trains with it.
_DIVISORS = {
    "lightning.pytorch.trainer.trainer": "Lightning divides by trainer.accumulate_grad_batches, except manual_backward",
    "pytorch_lightning.trainer.trainer": "Lightning divides by trainer.accumulate_grad_batches, except manual_backward",
    "transformers.trainer": "Trainer divides what compute_loss returns by self.current_gradient_accumulation_steps",
    "deepspeed.runtime.engine": "engine.backward divides by engine.gradient_accumulation_steps()",
}


def check_iterated(sampler: object, by: FrameType) -> None:
    """Refuses what deals or reorders a rank's own lists once more. by: the frame that begins to iterate over them."""
    name, caller, loader = type(sampler).__name__, by.f_globals.get("__name__", ""), by.f_locals.get("loader")
    if caller.startswith(("torch", "lightning")) and caller.endswith((".sampler", ".distributed")):
        raise ArgumentError(
            f"sampler: got a {name}, dealt once more by {caller}, expected it as the loader's batch_sampler, under "
            "Lightning with Trainer(use_distributed_sampler=False)"
        )
    if caller.startswith("torch") and getattr(loader, "num_workers", 0) > 0 and not getattr(loader, "in_order", True):
        raise ArgumentError(
            f"in_order: got False, with workers, for a {name}, whose lists are micro-batches one after another; "
            "expected True"
        )


def accumulated_by_accelerate() -> int:
    """The micro-batches over which accelerate accumulates: `accelerator.backward` divides by them."""
    module = sys.modules.get("accelerate.state")
    return 1 if module is None else int(module.GradientState().num_steps)


def check_nothing_divides(total: object) -> None:
    """Refuses a loss without loss_divisor where something divides it. total: of all micro-batches, or None."""
    if (steps := accumulated_by_accelerate()) > 1:
        raise ArgumentError(
            f"loss_divisor: got none, while accelerate accumulates {steps} micro-batches; expected {steps} for "
            "accelerator.backward, which divides the loss by them, or 1 for loss.backward()"
        )
    for module, divides in _DIVISORS.items():
        if total is not None and module in sys.modules:
            raise ArgumentError(
                f"loss_divisor: got none, expected a number, as {module} is imported: {divides}; 1 where nothing does"
            )


def keep_lists(sampler_class: Any) -> None:
    """Makes accelerate's `prepare` leave the lists of such a batch sampler as they are: they are one rank's already.

    For accelerate as it is imported by now; it has no setting for this. Raises StateError where accelerate is iterating
    over a loader that it may have prepared before.
    """
    module: Any = sys.modules.get("accelerate.accelerator")
    if module is None or hasattr(module.prepare_data_loader, "keeps_lists"):
        return
    prepare = module.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(dataloader: Any, *args: Any, **options: Any) -> Any:
        if isinstance(dataloader.sampler, sampler_class):
            raise ArgumentError(f"sampler: got a {sampler_class.__name__}, expected it as the loader's batch_sampler")
        sampler = dataloader.batch_sampler
        while hasattr(sampler, "batch_sampler"):  # skip_first_batches wraps it
            sampler = sampler.batch_sampler
        if isinstance(sampler, sampler_class):
            num_processes, steps = options["num_processes"], accumulated_by_accelerate()
            num_ranks, micro_batches = sampler._steps.num_ranks, sampler._steps.micro_batches
            if options["torch_device_mesh"] is None and num_ranks != num_processes:
                raise ArgumentError(
                    f"num_replicas: got {num_ranks}, in a loader for accelerate's {num_processes} processes; expected "
                    "as many"
                )
            if steps not in (1, micro_batches):
                raise ArgumentError(
                    f"micro_batches: got {micro_batches}, while accelerate accumulates {steps}; expected as many"
                )
            options |= {"num_processes": 1, "process_index": 0, "torch_device_mesh": None}
            options |= {"split_batches": False, "dispatch_batches": False}
        return prepare(dataloader, *args, **options)

    prepare_data_loader.keeps_lists = True  # type: ignore[attr-defined]
    module.prepare_data_loader = prepare_data_loader
    if module.GradientState().in_dataloader:
        raise StateError(
            "accelerate was imported after the BalancedBatchSampler was made; expected it to be there before"
        )
