"""What a calibration prints: a table, sentences."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.console import Group

from knapformer.calibration import Calibration
from knapformer.models.lora import RANK
from knapformer.tools.files import table_of

if TYPE_CHECKING:
    from knapformer.tools.measure.blocks import BlockTimes


def table(calibration: Calibration, times: BlockTimes) -> Group:
    passes = "forward, recompute and backward" if calibration.recomputes else "forward and backward"
    rows = zip(times.lengths, zip(*times.seconds, strict=True), times.per_block(), times.spreads(), strict=True)
    cells = []
    for length, kinds, block_s, spread in rows:
        expected_s = calibration.block_s(length)
        cells.append(
            {
                "tokens": f"{length:,}",
                **{
                    f"{count} x {name}": f"{statistics.median(seconds) * 1e3:.3f}"
                    for (name, count), seconds in zip(times.kinds, kinds, strict=True)
                },
                "mean block": f"{block_s * 1e3:.3f}",
                "spread": f"{spread:.1%}",
                "predicted": f"{expected_s * 1e3:.3f}",
                "error": f"{expected_s / block_s - 1:+.1%}",
            }
        )
    return table_of(
        cells,
        keys=("tokens",),
        caption=f"ms for one sequence: {passes} of one block, medians of {len(times.seconds[0][0])} rounds",
    )


def sentences(calibration: Calibration) -> list[str]:
    found = [
        f"gamma {calibration.gamma:.3f}, k {calibration.seconds_per_flop:.3e} s per FLOP (forward), which is "
        f"{calibration.flops_per_s / 1e12:.3g} TFLOP/s. The fit is off by {calibration.relative_rms_error:.1%} (RMS), "
        f"without gamma by {calibration.relative_rms_error_without_gamma:.1%}."
    ]
    if calibration.token_backward is not None:
        found.append(
            f"With a frozen base and adapters of rank {RANK} a backward pass over the per-token layers costs "
            f"{calibration.token_backward:.2f} forward passes (the cost model: 1), where all parameters train 2."
        )
    for name, cost in (("inside the node", calibration.node), ("between nodes", calibration.network)):
        if cost is not None:
            found.append(
                f"All-to-all {name}, {cost.num_ranks} ranks: {cost.latency_s * 1e6:.3g} us and "
                f"{cost.bytes_per_s / 1e9:.3g} GB/s that a rank sends, packing included; the fit is off by "
                f"{cost.relative_rms_error:.1%} (RMS)."
                + (f" In a step each takes {cost.wait_s * 1e6:.3g} us more." if cost.wait_s > 0 else "")
            )
    if (fixed := calibration.fixed) is not None:
        found.append(
            f"A micro-batch takes {fixed.seconds * 1e3:.3g} ms beside its blocks, on {fixed.num_ranks} ranks that "
            f"shard the model; with it whole steps are predicted to {fixed.relative_rms_error:.1%} (RMS)."
        )
    return found + [warning[0].upper() + warning[1:] + "." for warning in calibration.warnings]
