"""The published mixes, beside the published table: every rank's share measured on one device, or real steps on several.

Rows are of one micro-batch, so that they compare with the published steps, which had one. Tokens per second are those
of a rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from attention_kernels import calibration_path
from driver import Check, at_least, at_most, on_ranks
from settings import (
    MIXES,
    Agenda,
    flat_topologies,
    nested_topology,
    rank_device,
    run_command,
    scaled_mix,
    seconds_left,
    sizes_of,
)

from knapformer import Cluster

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))
from cluster_model import PUBLISHED_HFU, PUBLISHED_S, TOPOLOGIES

CORRELATION_GOAL = 0.99
SPREAD_GOAL = 0.05  # of seconds over planned work: standard deviation over mean
# Of the relative differences of the loss and of the gradient's norm from those of the step without a balancer.
LOSS_LIMITS = {"float32": 1e-3, "bfloat16": 2e-2}

Row = dict[str, Any]


def replay(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(replay_all, args, 1, backend=None, limit_s=seconds_left(args))
    return found


def replay_all(args: argparse.Namespace) -> dict[str, Any]:
    from knapformer.tools import cli

    rank_device(args)
    of, num_ranks = sizes_of(args), sizes_of(args).replay_ranks
    topologies = [*flat_topologies(num_ranks).values(), nested_topology(num_ranks)]
    results, rows, checks, agenda = {}, list[Row](), list[Check](), Agenda(args)
    found, errors = {"rows": rows, "results": results, "checks": checks}, list[Exception]()
    for mix in MIXES:
        if not agenda.begins(mix):
            continue
        path = args.out / f"replay-{mix}.json"
        options = ["--data", scaled_mix(mix, num_ranks), "--model", of.replay_model, "--device", args.device]
        options += [f"--topology={topology}" for topology in topologies]
        options += ["--json", str(path), *_peak(args), *of.replay, *_calibration(args, of.replay_model)]
        try:
            if (status := cli.main(["replay", *options])) != 0:
                raise RuntimeError(f"knapformer replay: exit status {status}, with the reason above")
        except Exception as error:  # the other mixes are still measured
            traceback.print_exc()
            errors.append(error)
            agenda.fails(mix)
            continue
        result = results[mix] = json.loads(path.read_text())
        of_mix = rows_of(mix, result, num_ranks)
        rows += of_mix
        checks += _work_checks(mix, result["variants"][0])  # without a balancer, so that ranks differ most
        # The published steps contain what a replay has none of.
        checks += _hfu_checks(of_mix, Cluster.published().fixed_s)
        agenda.keep(found)
    if errors:
        raise errors[0]
    return {**found, **agenda.result()}


def _work_checks(mix: str, variant: dict[str, Any]) -> list[Check]:
    """How well the ranks' measured seconds follow their planned work. Where the work differs little, the noise of a
    clock is enough to miss the correlation, and how far seconds spread over equal work says more."""
    seconds = f"{mix}: measured seconds with planned work of the ranks"
    spread = {"name": f"{seconds}, spread", **at_most(variant["spread"], SPREAD_GOAL)}
    if variant["correlation"] is None:
        return [spread]
    return [{"name": f"{seconds}, correlation", **at_least(variant["correlation"], CORRELATION_GOAL)}, spread]


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Real steps on all ranks: without a balancer, in flat and nested bags, and planned whole."""
    of, flat = sizes_of(args), flat_topologies(args.ranks)
    topologies = dict.fromkeys([*flat.values(), nested_topology(args.ranks)])
    results, rows, checks, agenda = {}, list[Row](), list[Check](), Agenda(args)
    found = {"rows": rows, "results": results, "checks": checks}
    for mix in of.steps_mixes:
        if not agenda.begins(mix):
            continue
        path = args.out / f"steps-{mix}.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "knapformer", "simulate", "--ranks", str(args.ranks), "--device", args.device]
        command += ["--data", scaled_mix(mix, args.ranks), "--model", of.steps_model, "--json", str(path)]
        command += [f"--topology={topology}" for topology in topologies]
        command += ["--micro-batches", str(of.micro_batches), *_peak(args), *of.steps]
        if "--gamma" not in of.steps:
            command += _calibration(args, of.steps_model)
        if (status := run_command(command, seconds_left(args))) != 0:
            raise RuntimeError(f"knapformer simulate: exit status {status}, with the reason above")
        result = results[mix] = json.loads(path.read_text())
        of_mix = rows_of(mix, result, args.ranks, of.micro_batches)
        rows += of_mix
        for variant in result["variants"][1:]:
            for what in ("loss", "gradient"):
                limit = LOSS_LIMITS[result["dtype"]]
                check = at_most(variant[f"{what}_difference"], limit)
                name = f"{mix}, {variant['name']}: {what} against no balancer"
                checks.append({"name": name, "correctness": True, **check})
        checks += _hfu_checks(of_mix)
        agenda.keep(found)
    return {**found, **agenda.result()}


def rows_of(mix: str, result: dict[str, Any], num_ranks: int, micro_batches: int = 1) -> list[Row]:
    """A row for each way to place the sequences, with published figures where the paper has that way."""
    names = {ours: theirs for theirs, ours in flat_topologies(num_ranks).items()}
    rows = []
    for variant in result["variants"]:
        topology = "none" if variant["topology"] is None else str(variant["topology"])
        planned_whole = "step planned" in str(variant["name"])
        row: Row = {
            "mix": mix,
            "way": "step planned whole" if planned_whole else topology,
            "fbl_s": variant["fbl_s"] / micro_batches,
            "tokens_per_rank_s": variant["tokens_per_s"] / num_ranks,
            "hfu": variant["hfu"],
            "published_s": None, "published_hfu": None, "published_tokens_per_rank_s": None,
        }  # fmt: skip
        theirs = names.get(topology, topology)
        if theirs in TOPOLOGIES and not planned_whole:
            column = TOPOLOGIES.index(theirs)
            row["published_s"], row["published_hfu"] = PUBLISHED_S[mix][column], PUBLISHED_HFU[mix][column] / 100
            # A published rank has as many tokens, since the mix has the same shares.
            row["published_tokens_per_rank_s"] = row["tokens_per_rank_s"] * row["fbl_s"] / row["published_s"]
        rows.append(row)
    return rows


def _hfu_checks(rows: list[Row], left_out_s: float = 0) -> list[Check]:
    """A check for the mix in the largest flat bags. The highest HFU was published of bags of 8: 29.7 %, of joint. No
    check where the device's peak is unknown. left_out_s: seconds of a published step that the rows do not count."""
    flat = [row for row in rows if row["hfu"] is not None and row["published_hfu"] is not None and row["way"] != "none"]
    return [
        {
            "name": f"{row['mix']} {row['way']}: HFU above the published",
            **at_least(row["hfu"], row["published_hfu"] * row["published_s"] / (row["published_s"] - left_out_s)),
        }
        for row in flat[-1:]
    ]


def _peak(args: argparse.Namespace) -> list[str]:
    return [] if args.peak_tflops is None else ["--peak-tflops", f"{args.peak_tflops:g}"]


def _calibration(args: argparse.Namespace, model: str) -> list[str]:
    """The option for the calibration of the kernel that the model chooses by itself, which is the first calibrated one;
    no option where that part has not run."""
    part = args.out / "calibrate.json"
    calibrated = json.loads(part.read_text()) if part.exists() else {}
    fits = calibrated.get("fits", []) if calibrated.get("device") == args.device_name else []
    kernels = [fit["kernel"] for fit in fits if fit["model"] == model]
    return ["--calibration", str(calibration_path(args.out, model, kernels[0]))] if kernels else []
