"""Which samples each rank draws in which step and micro-batch: those of --data, or of a file of lengths."""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from knapformer import ArgumentError, DataMix, Sample
from knapformer.tools.cli_args import refuse
from knapformer.tools.lengths_files import SampleFile, read_batches, read_samples
from knapformer.tools.model_presets import Preset
from knapformer.tools.rank_lengths import Lengths, micro_batches_of_step

_STEPS = 20
_MAX_SAMPLES = 1 << 18  # of all steps, where --steps does not say how many, and there are more than two


def mix_and_ranks(args: argparse.Namespace, num_ranks: int | None) -> tuple[DataMix, int]:
    """--data, and the ranks that draw it: num_ranks, else those of the mix. Raises ArgumentError."""
    mix = DataMix.parse(args.data, resolution_scale=args.scale, max_text_tokens=args.max_text_tokens)
    num_ranks = num_ranks or mix.num_ranks
    mix.check_divides(num_ranks)
    return mix, num_ranks


class Source:
    """samples: of the file, where there is one. num_samples: of the data set; 0 where it has no end."""

    def __init__(
        self,
        args: argparse.Namespace,
        num_ranks: int | None,
        preset: Preset | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        """num_ranks: that were asked for. preset, columns: as of read_samples, for a command that draws samples; None:
        a file has to say how its samples were drawn. Raises ArgumentError, OSError."""
        self._args, self.samples = args, SampleFile()
        self._mix: DataMix | None = None
        if args.data is not None:
            self._mix, self.num_ranks = mix_and_ranks(args, num_ranks)
        else:
            refuse(args, ("--scale", "--max-text-tokens", *(["--seed"] if preset is None else [])), "--lengths")
            self.samples = read_batches(args.lengths) if preset is None else read_samples(args.lengths, preset, columns)
            drawn = len(self.samples.batches[0]) if self.samples.batches else None
            if None not in (drawn, num_ranks) and drawn != num_ranks:
                raise ArgumentError(f"--ranks: got {num_ranks}, expected {drawn}, as {args.lengths} has, or none")
            if drawn is None and num_ranks is None:
                raise ArgumentError("--ranks: got none, expected the number of data-parallel ranks")
            self.num_ranks = drawn or num_ranks or 1
        self.num_samples = len(self.samples.lengths)

    @cached_property
    def pool(self) -> Sequence[int]:
        """The lengths of all samples; of a mix, those of one batch in each step."""
        return self.samples.lengths or [n for (batch,) in self.batches(1) for lens in batch for n in lens]

    @property
    def description(self) -> str:
        if self._mix is not None:
            return f"mix {self._args.data}"
        return f"{self._args.lengths}, {self.num_samples:,} samples ({self.samples.read_as})"

    def batches(self, micro_batches: int, tokens: Callable[[Sample], int] | None = None) -> list[list[Lengths]]:
        """Of --steps optimizer steps, [step][micro-batch][rank]; always the same ones.

        tokens: of a sample of the mix, where a model has others than were drawn. Raises ArgumentError."""
        if self._mix is not None:
            in_first = sum(map(len, self._mix.draw_lengths(self._args.seed, 0, self.num_ranks)))
            count = self._num_steps(in_first * micro_batches)
            batches = (self._of_mix(k, tokens) for k in range(count * micro_batches))
            return [list(itertools.islice(batches, micro_batches)) for _ in range(count)]
        if not self.samples.batches:
            rng, size = random.Random(self._args.seed), (self._args.batch_size or 1) * micro_batches
            count = self._num_steps(size * self.num_ranks)
            lengths = ([rng.choices(self.pool, k=size) for _ in range(self.num_ranks)] for _ in range(count))
            return [micro_batches_of_step(step, micro_batches) for step in lengths]
        drawn = self.samples.batches
        steps = [drawn[i : i + micro_batches] for i in range(0, len(drawn) - micro_batches + 1, micro_batches)]
        for option, asked, most in (
            ("micro-batches", micro_batches, len(drawn)),
            ("steps", self._args.steps or 1, len(steps)),
        ):
            if asked > most:
                there = f"{self._args.lengths} has {len(drawn)} batches"
                raise ArgumentError(f"--{option}: got {asked}, expected at most {most}: {there}")
        return steps[: self._num_steps(sum(map(len, drawn[0])) * micro_batches)]

    def _of_mix(self, number: int, tokens: Callable[[Sample], int] | None) -> Lengths:
        assert self._mix is not None
        if tokens is None:
            return self._mix.draw_lengths(self._args.seed, number, self.num_ranks)
        return [list(map(tokens, self._mix.draw(self._args.seed, number, rank))) for rank in range(self.num_ranks)]

    def _num_steps(self, num_samples: int) -> int:
        """How many steps of so many samples there are, at most."""
        if self._args.steps is not None:
            return int(self._args.steps)
        return max(2, min(_STEPS, _MAX_SAMPLES // max(1, num_samples)))
