"""What other packages' training loops do to a loss. Imports none of them."""

from __future__ import annotations

import sys

from knapformer._core import ArgumentError

# What divides a loss, by the module that is imported where a program trains with it.
_DIVISORS = {
    "lightning.pytorch.trainer.trainer": "Lightning divides by trainer.accumulate_grad_batches, except manual_backward",
    "pytorch_lightning.trainer.trainer": "Lightning divides by trainer.accumulate_grad_batches, except manual_backward",
    "transformers.trainer": "Trainer divides what compute_loss returns by self.current_gradient_accumulation_steps",
    "deepspeed.runtime.engine": "engine.backward divides by engine.gradient_accumulation_steps()",
}


def accumulated_by_accelerate() -> int:
    """The micro-batches over which accelerate accumulates: `accelerator.backward` divides by them."""
    module = sys.modules.get("accelerate.state")
    return 1 if module is None else int(module.GradientState().num_steps)


def check_nothing_divides(total: object) -> None:
    """Of a loss of which the caller has not said what divides it; total: of all micro-batches, or None."""
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
