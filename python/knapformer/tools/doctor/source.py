"""Where the lengths come from, and the optimizer steps that are drawn of them and simulated."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence

from knapformer import ArgumentError, DataMix
from knapformer.tools import cli_args
from knapformer.tools.presets import Preset
from knapformer.tools.sample_files import Samples, read_samples
from knapformer.tools.ways import Lengths, batches_of_mix, batches_of_step, micro_batches_of_step

_STEPS = 20
_MAX_SAMPLES = 1 << 18  # of all simulated steps of an alternative, where there are more than two: the work is bounded


class Source:
    """pool: the lengths of all samples. num_samples: of the data set; 0 where it has no end."""

    def __init__(self, args: argparse.Namespace, preset: Preset) -> None:
        self._args, self.samples = args, Samples()
        self._mix: DataMix | None = None
        if args.data is not None:
            self._mix, self.num_ranks = cli_args.mix_and_ranks(args)
        else:
            self.samples = read_samples(args.lengths, preset, args.columns)
            drawn = len(self.samples.steps[0]) if self.samples.steps else None
            if None not in (drawn, args.ranks) and drawn != args.ranks:
                raise ArgumentError(f"--ranks: got {args.ranks}, expected {drawn}, as {args.lengths} has, or none")
            self.num_ranks = drawn or args.ranks
            if self.num_ranks is None:
                raise ArgumentError("--ranks: got none, expected the number of data-parallel ranks")
            if not self.samples.lengths:
                raise ArgumentError(f"{args.lengths}: got no sample, expected at least one")
        if (self.samples.steps or self._mix) and args.batch_size is not None:
            source = args.lengths if args.data is None else "--data"
            raise ArgumentError(
                f"--batch-size: got {args.batch_size}, expected none: {source} states what each rank draws"
            )
        self.num_samples = len(self.samples.lengths)
        self.pool: Sequence[int] = self.samples.lengths or [
            length for (batch,) in self.batches(1) for lens in batch for length in lens
        ]

    @property
    def description(self) -> str:
        if self._mix is not None:
            return f"mix {self._args.data}"
        return f"{self._args.lengths}, {self.num_samples:,} samples ({self.samples.read_as})"

    def batches(self, micro_batches: int) -> list[list[Lengths]]:
        """Of optimizer steps, [step][micro-batch][rank]: the same ones for the same number of micro-batches."""
        args, drawn, num_ranks = self._args, self.samples.steps, self.num_ranks
        if self._mix is not None:
            in_first = sum(map(len, self._mix.draw_lengths(args.seed, 0, num_ranks)))
            steps = range(self._num_steps(in_first * micro_batches))
            return batches_of_mix(self._mix, args.seed, steps, micro_batches, num_ranks)
        if not drawn:
            rng, size = random.Random(args.seed), (args.batch_size or 1) * micro_batches
            count = self._num_steps(size * num_ranks)
            lengths = ([rng.choices(self.pool, k=size) for _ in range(num_ranks)] for _ in range(count))
            return [micro_batches_of_step(step, micro_batches) for step in lengths]
        if len(drawn) < micro_batches:
            raise ArgumentError(
                f"--micro-batches: got {micro_batches}, expected at most the {len(drawn)} batches of {args.lengths}"
            )
        count = min(self._num_steps(sum(map(len, drawn[0])) * micro_batches), len(drawn) // micro_batches)
        return [[drawn[i] for i in batches_of_step(step, micro_batches)] for step in range(count)]

    def _num_steps(self, num_samples: int) -> int:
        """How many steps of so many samples are simulated."""
        if self._args.steps is not None:
            return int(self._args.steps)
        return max(2, min(_STEPS, _MAX_SAMPLES // max(1, num_samples)))
