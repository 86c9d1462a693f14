"""How gamma depends on the attention kernel, the number of samples and the width, on one core of a CPU.

    python bench/bench_gamma.py [--json build/bench/gamma.json]

Times the plain transformer's block (forward, recomputation and backward in float32) at lengths from 64 to 2,048 tokens,
with torch's fused and unfused CPU attention, and with one and four samples at a time. Fits gamma to the times as
`knapformer calibrate` does. All settings are measured in turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from driver import parser_of, write_results
from knapformer.adapters.named import build_model
from knapformer.models import TransformerConfig
from knapformer.models.parallel import init_weights
from knapformer.models.step import PackedStep
from knapformer.tools.measure.blocks import BlockKind
from knapformer.tools.measure.timing import Work, measured_rounds
from torch.nn.attention import SDPBackend, sdpa_kernel

from knapformer import fit_workload

LENGTHS = [64, 128, 256, 512, 1024, 2048]
KERNELS = {"fused": SDPBackend.FLASH_ATTENTION, "unfused": SDPBackend.MATH}
SAMPLES = (1, 4)
WIDTHS = (256, 512)


def block_of(width: int) -> BlockKind:
    config = TransformerConfig(num_blocks=1, d_model=width, num_heads=width // 64, num_kv_heads=width // 64)
    model = build_model(config, torch.float32)
    init_weights(model)
    return BlockKind("block", 1, model)


def work(kind: BlockKind, width: int, kernel: SDPBackend, seq_lens: list[int]) -> Work:
    run = kind.work(PackedStep(seq_lens, width), [0] * len(seq_lens), True)

    def with_kernel() -> None:
        with sdpa_kernel(kernel):
            run()

    return with_kernel


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of each, medians count (default 5)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {width: block_of(width) for width in WIDTHS}
    ways = [(width, kernel, samples) for width in WIDTHS for kernel in KERNELS for samples in SAMPLES]
    prepare: list[Callable[[], Work]] = [
        partial(work, kinds[width], width, KERNELS[kernel], [length] * samples)
        for width, kernel, samples in ways
        for length in LENGTHS
    ]
    times = [statistics.median(of) for of in measured_rounds(prepare, torch.device("cpu"), args.rounds)]
    rows: list[dict[str, Any]] = []
    print("| width | attention | samples | gamma | fit off by |\n| --- | --- | --- | --- | --- |")
    for i, (width, kernel, samples) in enumerate(ways):
        seconds = [s / samples for s in times[i * len(LENGTHS) : (i + 1) * len(LENGTHS)]]
        fit = fit_workload(LENGTHS, seconds, width)
        rows.append({"width": width, "kernel": kernel, "samples": samples, "gamma": fit.gamma, "seconds": seconds})
        print(f"| {width} | {kernel} | {samples} | {fit.gamma:.2f} | {fit.relative_rms_error:.1%} |")
    if args.json is not None:
        write_results(args.json, "gamma", {"lengths": LENGTHS, "rounds": args.rounds}, rows=rows)


if __name__ == "__main__":
    main()
