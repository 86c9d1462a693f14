"""The page, the picture and the JSON file of all parts that have run. Measures nothing: any machine can make them."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver import Check
from knapformer.tools.files import check_packages, write_atomically

from knapformer import ArgumentError

if TYPE_CHECKING:
    import plotly.graph_objects as go

Results = dict[str, dict[str, Any]]  # by part
_SERIES = ("measured", "published")


def write_all(results: Results, folder: Path, error: str) -> tuple[list[Path], list[str]]:
    """Writes gpu.json, and gpu.html and gpu.png where their packages are installed. Returns the written files, and for
    each file that could not be drawn what is missing.

    error: which parts failed; empty where none did.
    """
    device = next(iter(results.values()))["device"] if results else "nothing measured"
    written, not_drawn = [folder / "gpu.json"], []
    summary = {part: [*of["checks"]] for part, of in results.items()}
    text = json.dumps(
        {"benchmark": "gpu", "device": device, "error": error, "checks": summary, "parts": results}, indent=1
    )
    write_atomically(str(written[0]), text + "\n")
    for name, package, write in (("gpu.html", "--report", _write_page), ("gpu.png", "--picture", _write_picture)):
        try:
            check_packages(package)
        except ArgumentError as lacking:
            not_drawn.append(f"{name}: {lacking}")
            continue
        write(folder / name, results, device, error)
        written.append(folder / name)
    return written, not_drawn


def goal_of(check: Check) -> str:
    return f"at least {check['at_least']:.3g}" if "at_least" in check else f"at most {check['at_most']:.3g}"


def value_of(check: Check) -> str:
    return f"did not run: {check['error']}" if "error" in check else f"{check['value']:.4g}"


def verdict(check: Check) -> str:
    return "pass" if check["passed"] else "FAIL" if check.get("correctness") else "missed"


def _write_page(path: Path, results: Results, device: str, error: str) -> None:
    from knapformer.tools.report.html_page import HtmlPage

    page = HtmlPage()
    for part, of in results.items():
        rows = of.get("rows", [])
        if rows:
            what = "measured, with modelled communication" if part == "replay" else "real steps"
            page.add(f"{part}: beside the published table", f"Seconds of a micro-batch, {what}.", _chart(rows), 420)
            page.add_table(f"{part}: figures", _TABLE_TEXT, map(_cells, rows))
        if of["left_out"]:
            page.add_table(f"{part}: left out", "Not done: run it again.", [{"what": w} for w in of["left_out"]])
        if of.get("absent"):
            page.add_table("calibrate: kernels that are not there", "Tried on two sequences.", of["absent"])
        if of.get("fits"):
            page.add_table(
                "calibrate: attention kernels", "Of one block, forward, recompute and backward.", map(_fit, of["fits"])
            )
        if "bytes_per_s" in of:
            rates = {"copy": of["copy_bytes_per_s"], **of["bytes_per_s"]}
            table = [{"what": name, "GB/s read and written": f"{rate / 1e9:,.1f}"} for name, rate in rates.items()]
            page.add_table("packing: bandwidth", "Of the packing kernel; copy: of a tensor, by torch.", table)
        if not_counted := of.get("launches", {}).get("not_counted"):
            page.add_table("launches", "Not counted.", [{"why": not_counted}])
        if of["checks"]:
            checks = [
                {"check": c["name"], "value": value_of(c), "goal": goal_of(c), "": verdict(c)} for c in of["checks"]
            ]
            page.add_table(
                f"{part}: goals",
                "FAIL: wrong results, or none. Missed: a goal that is not a matter of right or wrong.",
                checks,
            )
    checks = [check for of in results.values() for check in of["checks"]]
    figures = (
        (f"{sum(c['passed'] for c in checks)} of {len(checks)}", "goals met"),
        (str(sum(not c["passed"] and bool(c.get("correctness")) for c in checks)), "wrong results"),
        (html.escape(device), "device"),
    )
    settings = {
        part: "; ".join(
            [of["device"], of["environment"]["commit"] or "no commit", _took(of), of["environment"]["time"]]
        )
        for part, of in results.items()
    }
    if error:
        settings["error"] = error
    page.write(str(path), f"knapformer on {device}", html.escape(f"make gpu: {', '.join(results)}"), figures, settings)


def _took(of: dict[str, Any]) -> str:
    """How long the last go of a part took, unless it was stopped."""
    return f"{of['seconds']:.0f} s" if "seconds" in of else "stopped"


_TABLE_TEXT = (
    "FBL: seconds of a micro-batch, forward and backward, of the slowest rank. Tokens: of a rank in a second. HFU: "
    "FLOPs computed, recomputed ones too, over the device's peak. Published: the paper's Table 1, on 32 H100."
)


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    def shown(value: float | None, style: str) -> str:
        return "" if value is None else format(value, style)

    return {
        "mix": row["mix"],
        "way": row["way"],
        "FBL": shown(row["fbl_s"], ".3f"),
        "published": shown(row["published_s"], ".2f"),
        "tokens/s": shown(row["tokens_per_rank_s"], ",.0f"),
        "published tokens/s": shown(row["published_tokens_per_rank_s"], ",.0f"),
        "HFU": shown(row["hfu"], ".1%"),
        "published HFU": shown(row["published_hfu"], ".1%"),
    }


def _fit(fit: Mapping[str, Any]) -> dict[str, str]:
    return {
        "model": fit["model"],
        "kernel": fit["kernel"],
        "gamma": f"{fit['gamma']:.3f}",
        "TFLOP/s": f"{1 / fit['seconds_per_flop'] / 1e12:.3g}",
        "error of the fit": f"{fit['relative_rms_error']:.1%}",
        "warnings": "; ".join(fit["warnings"]),
    }


def _series(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[float | None]]]:
    """A label for each row, and the two series of _SERIES."""
    labels = [f"{row['mix']} {row['way']}" for row in rows]
    return labels, [[row["fbl_s"] for row in rows], [row["published_s"] for row in rows]]


def _chart(rows: list[dict[str, Any]]) -> go.Figure:
    import plotly.graph_objects as go

    figure = go.Figure()
    labels, series = _series(rows)
    for name, values in zip(_SERIES, series, strict=True):
        figure.add_bar(x=labels, y=values, name=name)
    figure.update_yaxes(title="seconds", rangemode="tozero")
    return figure


def _write_picture(path: Path, results: Results, device: str, error: str) -> None:
    from knapformer.tools.plots import COLOURS, new_figure, save_figure

    figure, (met, times) = new_figure(2, 14, 6)
    parts = list(results)
    for verdict_name, colour in (("pass", COLOURS[3]), ("missed", COLOURS[2]), ("FAIL", COLOURS[4])):
        counts = [sum(verdict(check) == verdict_name for check in results[part]["checks"]) for part in parts]
        left = [sum(verdict(check) in _BEFORE[verdict_name] for check in results[part]["checks"]) for part in parts]
        met.barh(parts, counts, left=left, color=colour, label=verdict_name)
    met.set(title="goals", xlabel="checks")
    met.legend(frameon=False)
    rows = [row for of in results.values() for row in of.get("rows", [])]
    _, series = _series(rows)
    labels = [f"{part}: {row['mix']} {row['way']}" for part, of in results.items() for row in of.get("rows", [])]
    for offset, (name, values) in enumerate(zip(_SERIES, series, strict=True)):
        places = [i + 0.4 * offset for i in range(len(rows))]
        times.barh(places, [value or 0 for value in values], height=0.4, color=COLOURS[1 - offset], label=name)
    times.set(title="seconds of a micro-batch", yticks=[i + 0.2 for i in range(len(rows))])
    times.set_yticklabels(labels, fontsize=6)
    times.invert_yaxis()
    times.legend(frameon=False)
    save_figure(figure, str(path), f"make gpu, {device}" + (f"; {error}" if error else ""))


_BEFORE: dict[str, tuple[str, ...]] = {"pass": (), "missed": ("pass",), "FAIL": ("pass", "missed")}
