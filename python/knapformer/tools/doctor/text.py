"""The findings in words and as a table, for somebody who has read nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from knapformer import TopologyOption
from knapformer._core import DEFAULT_GAMMA
from knapformer.tools.doctor import topologies
from knapformer.tools.doctor.alternatives import Case, Result
from knapformer.tools.doctor.source import Source
from knapformer.tools.doctor.verdict import Verdict
from knapformer.tools.files import show, table_of
from knapformer.tools.presets import DEFAULT_PRESET, Preset


def verdict_text(verdict: Verdict, source: Source) -> str:
    """One paragraph. What makes it doubtful comes first."""
    caution = f"Caution: {source.samples.left_out()} What follows is of the others alone. "
    return caution + verdict.text if source.samples.many_left_out else verdict.text


def what_to_change(taken: Result, case: Case, preset: Preset) -> str:
    """In code where it is this project's."""
    model = f"diffusers' {preset.transformer}"
    of, gamma = taken.alternative, "" if case.planning.gamma == DEFAULT_GAMMA else f", gamma={case.planning.gamma:.3g}"
    if of.key == "sampler":
        limit = f", max_tokens_per_rank={case.max_tokens}" if case.max_tokens else ""
        packs = (
            f"knapformer.balance(transformer), so that {model} takes samples of any sizes; "
            if preset.transformer
            else ""
        )
        return (
            "in the data loader, batch_sampler=knapformer.BalancedBatchSampler(lengths, "
            f"batch_size={max(1, round(case.batch_size))}, d_model={case.planning.d_model}, "
            f"micro_batches={case.micro_batches}{gamma}{limit}); {packs}losses weighed with "
            "knapformer.losses.token_mean."
        )
    if not of.topology:
        return f"{of.change}."
    balancer = f'knapformer.SequenceBalancer("{of.topology}"{gamma})'
    whole = (
        ""
        if case.micro_batches == 1
        else " Plan the micro-batches of a step together: plan_routing(..., micro_batches=K)."
    )
    if preset.transformer:
        return (
            f"knapformer.balance(transformer, {balancer}), where transformer is {model}; then call it with a list "
            f"of samples.{whole}"
        )
    return f"the model calls route, attention and reverse_route of balancer = {balancer}.{whole}"


def print_findings(
    source: Source, preset: Preset, case: Case, rows: Sequence[Mapping[str, str]], results: Sequence[Result],
    verdict: Verdict, ranking: Sequence[TopologyOption],
) -> None:  # fmt: skip
    """rows: of the table, one for each result. ranking: of topologies, if they are to be listed."""
    hours = f"of the {source.num_samples:,} samples" if source.num_samples else "of a million samples"
    lens = source.pool
    parts: list[Any] = [verdict_text(verdict, source)]
    if verdict.is_worth_it:
        parts.append(f"What to change: {what_to_change(verdict.taken, case, preset)}")
    if (aside := verdict.aside()) is not None:
        parts.append(aside)
    if source.samples.bad_rows and not source.samples.many_left_out:
        parts.append(source.samples.left_out())
    parts += [
        f"Samples: {source.description}, median {statistics.median(lens):,.0f} tokens, longest {max(lens):,}.",
        "",
        table_of(rows, left="alternative"),
        f"speed: times {verdict.now.alternative.name}, on equal work, with the standard error over draws.\n"
        f"hours: of one accelerator, {hours}.\n"
        "wait: of computing time, for the slowest rank or on padding.\n"
        "GB: that a rank sends in a step, in its node / to others. GiB: of the fullest rank.\n"
        "BalancedBatchSampler: samples whole, all micro-batches of a step planned at once; nothing is sent.\n"
        "balancer, 1-N ranks: in the model; long samples are shared by up to N ranks. N ranks: every sample is, by N.",
    ]
    parts += [f"{r.alternative.name} {case.too_much}: {r.problem}." for r in results if r.problem is not None]
    of_drawn = case.batch_size * case.num_ranks * case.micro_batches or 1
    for result in results:
        if result.alternative.effect and result.problem is None:
            ratio = f"{result.mean('samples') / of_drawn:.2g}"
            more = "" if ratio == "1" else f" (here {ratio} times as many samples)"
            parts.append(f"{result.alternative.name}: {result.alternative.effect}{more}.")
    if ranking:
        parts += ["", *topologies.table(ranking, case)]
    show(*parts, "", *_assumed(source, preset, case))


def _assumed(source: Source, preset: Preset, case: Case) -> list[str]:
    planning, cluster, model = case.planning, case.planning.cluster, case.planning.model
    default = ", the default of --model" if preset.name == DEFAULT_PRESET else ""
    limit = "memory is not limited"
    if case.max_tokens:
        limit = f"{case.max_tokens:,} tokens of a rank fit in memory"
    if case.limit_is_given:
        limit = f"at most {case.max_tokens:,} tokens of a rank (--max-tokens-per-rank)"
    lines = [
        "Assumed:",
        f"  model: {preset.name}{default}: {model.num_blocks} blocks of width {planning.d_model}, "
        f"{model.num_parameters / 1e9:.3g}e9 parameters, {model.num_heads} heads; {model.mode}; {limit}",
        f"  ranks: {source.num_ranks:,} in nodes of {cluster.ranks_per_node}, {digits(case.batch_size)} samples x "
        f"{case.micro_batches} micro-batches each; FSDP2: ranks wait in every micro-batch",
        f"  rates: {cluster.flops_per_s / 1e12:.3g} TFLOP/s, of attention {planning.gamma:g} times the seconds per "
        f"FLOP (gamma); {cluster.node_bytes_per_s / 1e9:g} and {cluster.network_bytes_per_s / 1e9:g} GB/s in and "
        f"between nodes, fixed {cluster.fixed_s:g} s a micro-batch",
    ]
    if case.job_ranks:
        lines.append(
            f"  simulated: {case.num_ranks:,} of the {case.job_ranks:,} ranks, in {len(case.batches)} steps. With "
            "all ranks the slowest is slower, so steps take rather longer than shown"
        )
    elif source.fewer_steps:
        lines.append(f"  simulated: {len(case.batches)} steps, since a step has so many samples (--steps for more)")
    return lines


def cells(result: Result, figures: Mapping[str, Any]) -> dict[str, str]:
    headings = ("step s", "speed", "hours", "wait", "GB", "GiB")
    if result.problem is not None:
        return {"alternative": result.alternative.name, **dict.fromkeys(headings, "-")}
    speed = "-" if figures["speedup"] is None else f"{figures['speedup']:.2f}"
    if figures["speedup_standard_error"]:
        speed += f" ± {figures['speedup_standard_error']:.2f}"
    sent = "/".join(_two_digits(figures[f"gb_{where}_per_rank"]) for where in ("in_node", "between_nodes"))
    values = (
        digits(figures["step_s"]), speed, digits(figures["device_hours"]), f"{figures['waiting']:.0%}", sent,
        f"{figures['max_gib']:.0f}",
    )  # fmt: skip
    return {"alternative": result.alternative.name, **dict(zip(headings, values, strict=True))}


def digits(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
