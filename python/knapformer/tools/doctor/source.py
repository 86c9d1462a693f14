"""Where the lengths come from, and the optimizer steps that are drawn of them and simulated."""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence

from knapformer import ArgumentError, DataMix
from knapformer.tools import cli_args
from knapformer.tools.measure.progress import Progress
from knapformer.tools.presets import Preset
from knapformer.tools.sample_files import Samples, read_samples
from knapformer.tools.ways import Lengths, batches_of_step, micro_batches_of_step

# The work is bounded. Each further step takes 0.9, 1.3 and 5.1 s of one core at 2,048, 4,096 and 8,192 ranks with one
# sample each: `doctor lengths.csv --ranks N --steps 2` and `--steps 4`.
_MAX_RANKS = 1 << 12
_MAX_SAMPLES = 1 << 18  # of all simulated steps of an alternative
_STEPS = 20


class Source:
    """num_ranks: of the job; simulated_ranks: how many of them are simulated. pool: the lengths of all samples.
    num_samples: of the data set; 0 where it has no end."""

    def __init__(self, args: argparse.Namespace, preset: Preset, ranks_per_node: int) -> None:
        self._args = args
        self.samples = Samples()
        self._mix: DataMix | None = None
        if args.data is not None:
            self._mix, self.num_ranks = cli_args.mix_and_ranks(args)
        else:
            self._read(preset)
        steps, source = self.samples.steps, args.lengths if args.data is None else "--data"
        if (steps or self._mix) and args.batch_size is not None:
            raise ArgumentError(
                f"--batch-size: got {args.batch_size}, expected none: {source} states what each rank draws"
            )
        self.num_samples = len(self.samples.lengths)
        self.simulated_ranks = self._simulated(ranks_per_node)
        self.fewer_steps = False
        self.pool: Sequence[int] = self.samples.lengths or [
            length for (batch,) in self.batches(1) for lens in batch for length in lens
        ]

    def _read(self, preset: Preset) -> None:
        args = self._args
        with Progress(1, enabled=sys.stderr.isatty()) as progress:
            progress.describe(f"reading {args.lengths}")
            self.samples = read_samples(args.lengths, preset, args.columns)
        steps = self.samples.steps
        if steps and args.ranks not in (None, len(steps[0])):
            raise ArgumentError(f"--ranks: got {args.ranks}, expected {len(steps[0])}, as {args.lengths} has, or none")
        if not steps and args.ranks is None:
            raise ArgumentError("--ranks: got none, expected the number of data-parallel ranks")
        self.num_ranks = len(steps[0]) if steps else args.ranks

    @property
    def description(self) -> str:
        if self._mix is not None:
            return f"mix {self._args.data}"
        return f"{self._args.lengths}, {self.num_samples:,} samples ({self.samples.read_as})"

    def _batch(self, number: int, num_ranks: int) -> Lengths:
        """As it was drawn, by the first ranks."""
        if self._mix is not None:
            return self._mix.draw_lengths(self._args.seed, number, num_ranks)
        return self.samples.steps[number][:num_ranks]

    def _simulated(self, ranks_per_node: int) -> int:
        """All ranks; or, of many, so many that bags, groups and the mix divide them as they divide all."""
        of_mix = 1 if self._mix is None else self._mix.num_ranks
        period = math.lcm(2 * ranks_per_node, 8, of_mix)
        common = math.gcd(self.num_ranks, period)
        per_rank = self._args.batch_size or 1
        if self._mix is not None or self.samples.steps:
            batch = self._batch(0, self.num_ranks if self._mix is None else of_mix)
            per_rank = sum(map(len, batch)) / len(batch)
        most = max(min(_MAX_RANKS, _MAX_SAMPLES // 2 // max(1, int(per_rank * self._args.micro_batches))), period)
        fewer = (count for count in range(most, 0, -1) if math.gcd(count, period) == common)
        return self.num_ranks if self.num_ranks <= most else next(fewer, self.num_ranks)

    def batches(self, micro_batches: int) -> list[list[Lengths]]:
        """Of optimizer steps, [step][micro-batch][rank]: the same ones for the same number of micro-batches."""
        args, drawn, num_ranks = self._args, self.samples.steps, self.simulated_ranks
        if self._mix is None and not drawn:
            rng, size = random.Random(args.seed), (args.batch_size or 1) * micro_batches
            count = self._num_steps(size * num_ranks)
            steps = ([rng.choices(self.pool, k=size) for _ in range(num_ranks)] for _ in range(count))
            return [micro_batches_of_step(step, micro_batches) for step in steps]
        if drawn and len(drawn) < micro_batches:
            raise ArgumentError(
                f"--micro-batches: got {micro_batches}, expected at most the {len(drawn)} batches of {args.lengths}"
            )
        count = self._num_steps(sum(map(len, self._batch(0, num_ranks))) * micro_batches)
        count = min(count, len(drawn) // micro_batches) if drawn else count
        return [[self._batch(i, num_ranks) for i in batches_of_step(step, micro_batches)] for step in range(count)]

    def _num_steps(self, num_samples: int) -> int:
        """How many steps of so many samples are simulated."""
        if self._args.steps is not None:
            return int(self._args.steps)
        self.fewer_steps = num_samples * _STEPS > _MAX_SAMPLES
        return max(2, min(_STEPS, _MAX_SAMPLES // max(1, num_samples)))
