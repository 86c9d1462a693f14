"""A plan as one HTML file that opens offline: everything, plotly too, is in it."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence

from knapformer import ArgumentError, Plan, StepTime, plan_home, predict_step
from knapformer.json_file import read_json
from knapformer.tools.cost_args import settings_dict
from knapformer.tools.files import check_packages
from knapformer.tools.report.html_page import HtmlPage
from knapformer.tools.ways import NO_BALANCER


def write_report(
    path: str, plan: Plan, *, measured_s: Mapping[str, Sequence[float]] | None = None, title: str | None = None
) -> None:
    """Writes the report of a plan to `path`, whole or not at all. For a step it shows all micro-batches, and the
    one that takes longest in detail.

    measured_s: measured step times in seconds, by a name ("no balancer", "g8n4"), shown beside the predicted ones.
    Raises ArgumentError, OSError.
    """
    check_packages("--report")
    from knapformer.tools.report import charts

    if plan.num_tokens == 0:
        raise ArgumentError("plan: got one without sequences, expected at least one sequence to report on")
    page, detail, figures = HtmlPage(), "", list[tuple[str, str]]()
    if plan.num_micro_batches > 1:
        whole, longest = plan, max(range(plan.num_micro_batches), key=plan.predicted_times.__getitem__)
        detail = f"; of {plan.num_micro_batches} micro-batches, number {longest} in detail, which takes longest"
        waits = "in each" if plan.sync == "micro_batch" else "once, at the end of the step"
        text = f"Work of one block over the mean of a rank and micro-batch. Ranks wait for each other {waits}."
        page.add("The step: work per rank and micro-batch", text, charts.work_per_micro_batch(plan), 380)
        plan = plan.plans[longest]
        figures += [
            (f"{whole.predicted_time:.3g} s", f"predicted step of {whole.num_micro_batches} micro-batches"),
            (f"{whole.predicted_time / whole.ideal_time - 1:.2%}", "over ideal"),
            (f"{whole.tokens_moved / whole.num_tokens:.1%}", "of the step's tokens change ranks"),
        ]
    before, step = predict_step(plan_home(plan)), predict_step(plan)
    text = "Of one block, over the mean: what the longest bar is above 1 is the time that the others wait."
    page.add("Work per rank", text, charts.work_per_rank(plan), 340)
    text = "One bar for each rank, cut into the sequences that lie there; point at one for its length, home and chunk. "
    num_drawn = charts.num_drawn(plan)
    text += "Dotted lines: bags. " + (f"The first {num_drawn} ranks." if plan.num_ranks > num_drawn else "")
    page.add("Where every sequence lies", text, charts.placement(plan), 600)
    rows = {name: _terms(time) for name, time in ((NO_BALANCER, before), (str(plan.topology), step))}
    medians = {name: statistics.median(seconds) for name, seconds in (measured_s or {}).items() if seconds}
    rows |= {f"{name}, measured": {"measured": median_s} for name, median_s in medians.items()}
    text = "Predicted by the cluster model; terms of the slowest group of ranks."
    text += " Measured: medians over steps." if medians else ""
    title_of_axis = "seconds a step, forward and backward"
    page.add("Step time", text, charts.stacked_bars(rows, title_of_axis))
    figures += [
        (f"{plan.max_over_mean_before:.2f} → {plan.max_over_mean_after:.3f}", "slowest rank's work over the mean"),
        (f"{plan.wir_before:.2f} → {plan.wir_after:.2f}".replace("inf", "∞"), "highest over lowest work (WIR)"),
        *_faster("predicted", before.total_s, step.total_s),
        (f"{max(plan.tokens_before):,} → {max(plan.tokens_after):,}", "tokens of the fullest rank"),
        (f"{plan.tokens_moved / plan.num_tokens:.1%}", "of the tokens change ranks"),
        (_bytes(step.route_bytes.total + step.attention_bytes.total), "sent between ranks in a step"),
        (_bytes(step.route_bytes.between + step.attention_bytes.between), "of that leaves a node"),
    ]
    if NO_BALANCER in medians and len(medians) > 1:
        *_, last_s = (median_s for name, median_s in medians.items() if name != NO_BALANCER)
        figures += _faster("measured", medians[NO_BALANCER], last_s)
    settings = {
        "topology": plan.topology, "solver": plan.solver, "width": plan.d_model, "gamma": f"{plan.workload.gamma:g}",
        **{field: value for part in settings_dict(plan).values() for field, value in part.items()},
    }  # fmt: skip
    subtitle = (
        f"{plan.num_ranks:,} ranks, {plan.num_sequences:,} sequences, {plan.num_tokens:,} tokens; "
        f"bags: {html.escape(str(plan.topology))}"
        + (f", {plan.topology.num_replicas} times" if plan.topology.num_replicas > 1 else "")
        + detail
    )
    page.write(path, title or f"knapformer: {plan.num_ranks:,} ranks, {plan.topology}", subtitle, figures, settings)


def _terms(time: StepTime) -> dict[str, float]:
    return {label: time.terms[term] for term, label in StepTime.labels().items()}


def _faster(how: str, before_s: float, after_s: float) -> list[tuple[str, str]]:
    return [
        (f"{before_s:.3g} → {after_s:.3g} s", f"{how} step"), (f"{before_s / after_s:.2f} times", f"{how} speed-up")
    ]  # fmt: skip


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
