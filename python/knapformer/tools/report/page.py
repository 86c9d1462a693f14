"""A plan as one HTML file that opens offline: everything, plotly too, is in it."""

from __future__ import annotations

import html
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from knapformer import ArgumentError, Plan, StepPlan, StepTime, plan_home, predict_step
from knapformer.json_file import read_json
from knapformer.tools.cost_args import settings_dict
from knapformer.tools.files import check_packages
from knapformer.tools.report.html_page import HtmlPage
from knapformer.tools.report.placement import MAX_RANKS, bars_of
from knapformer.tools.ways import NO_BALANCER


def write_report(
    path: str,
    plan: Plan | StepPlan,
    *,
    measured_s: Mapping[str, Sequence[float]] | None = None,
    points: Sequence[Mapping[str, Any]] = (),
    title: str | None = None,
) -> None:
    """Writes the report of a plan to `path`, whole or not at all. For a step it shows all micro-batches, and the
    one that takes longest in detail.

    measured_s: measured step times in seconds, by a name ("no balancer", "g8n4"), shown beside the predicted ones.
    points: predictions over the number of ranks, as plan --predictions writes them.
    Raises ArgumentError, OSError.
    """
    check_packages("--report")
    from knapformer.tools.report import charts

    if plan.num_tokens == 0:
        raise ArgumentError("plan: got one without sequences, expected at least one sequence to report on")
    page, detail = HtmlPage(), ""
    step_figures: tuple[tuple[str, str], ...] = ()
    if isinstance(plan, StepPlan):
        longest = max(range(plan.num_micro_batches), key=plan.predicted_times.__getitem__)
        detail = f"; of {plan.num_micro_batches} micro-batches, number {longest} in detail, which takes longest"
        step_figures = _add_step(page, plan)
        plan = plan.plans[longest]
    measured_s = measured_s or {}
    predicted = {NO_BALANCER: predict_step(plan_home(plan)), str(plan.topology): predict_step(plan)}
    bars = bars_of(plan)
    text = "Of one block, over the mean: what the longest bar is above 1 is the time that the others wait."
    page.add("Work per rank", text, charts.work_per_rank(plan), 340)
    page.add(
        "Where every sequence lies", _placement_text(plan.num_ranks, bars.num_merged), charts.placement(bars, plan), 600
    )
    text = "Predicted by the cluster model; terms of the slowest group of ranks. "
    text += "Measured: one point a step." if measured_s else ""
    page.add("Step time", text, charts.step_times(predicted, measured_s))
    if points:
        page.add("As the cluster grows", "Predicted; means over steps.", charts.scaling(points), 360)
    step = predicted[str(plan.topology)]
    figures = (
        *step_figures,
        (f"{plan.max_over_mean_before:.2f} → {plan.max_over_mean_after:.3f}", "slowest rank's work over the mean"),
        (f"{plan.wir_before:.2f} → {plan.wir_after:.2f}".replace("inf", "∞"), "highest over lowest work (WIR)"),
        *_step_figures(predicted, measured_s),
        (f"{max(plan.tokens_before):,} → {max(plan.tokens_after):,}", "tokens of the fullest rank"),
        (f"{plan.tokens_moved / plan.num_tokens:.1%}", "of the tokens change ranks"),
        (_bytes(step.route_bytes.total + step.attention_bytes.total), "sent between ranks in a step"),
        (_bytes(step.route_bytes.between + step.attention_bytes.between), "of that leaves a node"),
    )
    settings = {
        "topology": plan.topology, "solver": plan.solver, "width": plan.d_model, "gamma": f"{plan.workload.gamma:g}",
        **{field: value for part in settings_dict(plan.cluster, plan.model).values() for field, value in part.items()},
    }  # fmt: skip
    subtitle = (
        f"{plan.num_ranks:,} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens; "
        f"bags: {html.escape(str(plan.topology))}"
        + (f", {plan.topology.num_replicas} times" if plan.topology.num_replicas > 1 else "")
        + detail
    )
    page.write(path, title or f"knapformer: {plan.num_ranks:,} ranks, {plan.topology}", subtitle, figures, settings)


def _add_step(page: HtmlPage, step: StepPlan) -> tuple[tuple[str, str], ...]:
    """Adds the charts of the whole step, and returns its figures for the top of the page."""
    from knapformer.tools.report import charts

    waits = "in each" if step.sync == "micro_batch" else "once, at the end of the step"
    text = f"Work of one block over the mean of a rank and micro-batch. Ranks wait for each other {waits}."
    page.add("The step: work per rank and micro-batch", text, charts.work_per_micro_batch(step), 380)
    text = "Predicted by the cluster model; terms of the slowest group of ranks."
    page.add("The step: time of each micro-batch", text, charts.micro_batch_times(step), 300)
    over_ideal = step.predicted_time / step.ideal_time - 1
    return (
        (f"{step.predicted_time:.3g} s", f"predicted step of {step.num_micro_batches} micro-batches"),
        (f"{over_ideal:.2%}", "over ideal"),
        (f"{step.tokens_moved / step.num_tokens:.1%}", "of the step's tokens change ranks"),
    )


def _step_figures(
    predicted: Mapping[str, StepTime], measured_s: Mapping[str, Sequence[float]]
) -> Iterator[tuple[str, str]]:
    """Seconds of a step without and with the plan, and how many times faster."""
    yield from _faster("predicted", *(step.total_s for step in predicted.values()))
    others = [name for name in measured_s if name != NO_BALANCER and measured_s[name]]
    if others and measured_s.get(NO_BALANCER):
        yield from _faster("measured", *(statistics.median(measured_s[name]) for name in (NO_BALANCER, others[-1])))


def _faster(how: str, before_s: float, after_s: float) -> Iterator[tuple[str, str]]:
    yield f"{before_s:.3g} → {after_s:.3g} s", f"{how} step"
    yield f"{before_s / after_s:.2f} times", f"{how} speed-up"


def _placement_text(num_ranks: int, num_merged: int) -> str:
    text = (
        "One bar for each rank, cut into the sequences that lie there; point at one for its length, home and chunk. "
        "Dotted lines: bags. "
    )
    if num_ranks > MAX_RANKS:
        text += f"The first {MAX_RANKS} ranks. "
    if num_merged:
        text += f"The shortest {num_merged:,} are drawn together, one piece for each rank. "
    return text


def _bytes(num_bytes: float) -> str:
    from knapformer.tools.report.charts import scale_of

    scale, unit = scale_of(num_bytes, "B")
    return f"{num_bytes / scale:.3g} {unit}"


def measured_of(results: str) -> dict[str, list[float]]:
    """Step times by variant from what simulate or replay --json wrote. Raises ArgumentError, OSError."""
    content = read_json(results, "--measured")
    try:
        return {
            str(variant.get("name") or variant["topology"] or NO_BALANCER): [
                float(s) for s in variant["fbl_per_step_s"]
            ]
            for variant in content["variants"]
        }
    except (KeyError, TypeError, ValueError):
        raise ArgumentError(f"--measured: {results}: expected the results of knapformer simulate or replay") from None
