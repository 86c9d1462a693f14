"""The doctor's findings as an HTML file: the alternatives, what a step's time goes to in each, the lengths."""

from __future__ import annotations

import html
import statistics

from knapformer.tools.doctor.alternatives import Result
from knapformer.tools.doctor.findings import Findings, alike
from knapformer.tools.report import charts
from knapformer.tools.report.html_page import HtmlPage


def write_page(path: str, found: Findings) -> None:
    """Raises OSError."""
    page, verdict, case, source = HtmlPage(), found.verdict, found.case, found.source
    cells = alike(((row["alternative"], row) for row in found.rows), lambda row: tuple(row.values())[1:])
    rows = [{**row, "alternative": names} for names, row in cells.items()]
    page.add_table("Alternatives", "Per optimizer step, in the mean; predicted.", rows)
    shares = alike(
        ((of.alternative.name, _shares(of)) for of in found.results if of.problem is None),
        lambda of: tuple(map(round, of.values())),
    )
    if shares:
        text = "The more of a step is work, the faster it is: the ratio of two is the speed-up on equal work."
        page.add("What a step's time goes to", text, charts.stacked_bars(shares, "% of the step"))
    text = "Attention's work grows with the square of the length: few long samples can hold most of it."
    lens = source.pool
    works = {length: case.planning.work(length) for length in set(lens)}
    page.add("Lengths and work", text, charts.distribution(lens, [works[n] for n in lens]), 300)
    top = [
        (f"{statistics.median(lens):,.0f} → {max(lens):,}", "tokens of the median and of the longest sample"),
        (f"{source.num_ranks:,}", "ranks"),
        (f"{case.micro_batches}", "micro-batches of a step"),
    ]
    if verdict.is_worth_it and verdict.now.problem is None:
        top.insert(0, (f"{verdict.speedup:.2f} times", f"as fast as {verdict.now.alternative.name}"))
    settings = {
        "lengths": source.description, "model": found.preset.name, "ranks": source.num_ranks,
        "ranks that are simulated": case.num_ranks, "samples of a micro-batch": case.batch_size,
        "micro-batches": case.micro_batches, "width": case.planning.d_model, "gamma": case.planning.gamma,
        **case.planning.cluster.to_dict(), **case.planning.model.to_dict(),
    }  # fmt: skip
    said = " ".join(filter(None, (found.verdict_text, verdict.aside())))
    subtitle = f"{source.description}; {source.num_ranks} ranks, {case.micro_batches} micro-batches"
    page.write(path, said, html.escape(subtitle), top, settings)


def _shares(result: Result) -> dict[str, float]:
    """Of the mean rank, in % of the step."""
    total_s, work_s = result.mean("total_s"), result.work_s
    waiting_s = max(0.0, result.mean("token_s", "attention_s") - work_s)
    rest_s = result.mean("fsdp_s", "host_s", "fixed_s")
    seconds = {
        "work": work_s,
        "waiting, or computing padding": waiting_s,
        "exchanging": max(0.0, total_s - work_s - waiting_s - rest_s),
        "the rest": rest_s,
    }
    return {name: 100 * of / total_s for name, of in seconds.items()}
