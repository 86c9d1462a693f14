"""What test_train_lora.py runs on two ranks: examples/train_lora.py, several times in one process each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
LAUNCHED_WITH = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # what `accelerate launch --use_fsdp --fsdp_version 2 ...` sets beside ACCELERATE_USE_FSDP


def _take_fsdp2() -> None:
    """Makes accelerate use FSDP2 here: it would do so only with an accelerator, but its code runs on CPUs as well."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import DistributedType

    os.environ.update(LAUNCHED_WITH)
    state = Accelerator(cpu=True).state
    PartialState().distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()


def trainings(rank: int, world: int, data: Path, out: Path, steps: int) -> dict[str, list[float]]:
    """Losses of the plain loop, of the balanced one, and of one that goes on from the middle of an epoch."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    common = ("--data", str(data), "--cpu", "--save-every", str(steps))

    def whole(name: str, *options: str) -> list[float]:
        return _losses(*common, *options, "--out", str(out / name), "--steps", str(steps))

    def in_parts(name: str, *options: str) -> list[float]:
        options = (*common, *options, "--out", str(out / name))
        first = _losses(*options, "--steps", str(steps // 2 - 1))
        return first + _losses(*options, "--steps", str(steps), "--resume")

    return {
        "lora plain": whole("lora plain", "--plain"),
        "lora ddp": whole("lora ddp"),
        "lora ddp, resumed": in_parts("lora ddp, resumed"),
        "lora fsdp2, resumed": in_parts("lora fsdp2, resumed", "--fsdp2"),
        "full plain": whole("full plain", "--full", "--plain"),
        "full fsdp2": whole("full fsdp2", "--full", "--fsdp2"),
        "full fsdp2, resumed": in_parts("full fsdp2, resumed", "--full", "--fsdp2"),
    }


def _losses(*options: str) -> list[float]:
    """options: those of the program; "--fsdp2" stands for accelerate's own launch options."""
    sys.path.insert(0, str(EXAMPLES))
    from accelerate.state import AcceleratorState
    from train_lora import parse_arguments, train

    AcceleratorState._reset_state(reset_partial_state=True)
    if "--fsdp2" in options:
        _take_fsdp2()
    losses = train(parse_arguments([option for option in options if option != "--fsdp2"]))
    assert AcceleratorState().is_fsdp2 == ("--fsdp2" in options)
    return losses
