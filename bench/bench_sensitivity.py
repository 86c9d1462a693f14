"""What a wrong gamma, another network, data that need no balancing, and parts left out cost, by predicted steps.

    python bench/bench_sensitivity.py --json build/bench/sensitivity.json
    python bench/bench_sensitivity.py --part losing

    gamma     a step planned at one gamma and timed at another, the true one, over a step planned at the true one
    network   each alternative of `knapformer doctor` from NVLink to 25 Gbit/s Ethernet between all ranks
    losing    data where balancing has nothing to gain: what it costs there
    caps      samples longer than a rank can hold
    parts     planning without a part of the planner, or without overlap, on the workloads of bench_solvers.py
    clips     a clip longer than the ranks that heads alone can share it over, on the default cluster

Figures are means over steps of the published mixes and of made-up lengths, on 32 ranks. The cost model predicts the
times (docs/cluster_model.md), with the default cluster, but (`parts` aside) without its fixed time of a step, and with
FLUX's blocks.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench_solvers import WORKLOADS, even
from driver import parser_of, write_results
from knapformer.tools.doctor.alternatives import alternatives, gain, ranked, sharing, simulate
from knapformer.tools.rank_lengths import Lengths, micro_batches_of_step
from knapformer.tools.ways import DrawnSteps, PlanCost

import knapformer

D_MODEL, NUM_RANKS = 3072, 32
MODEL = knapformer.TrainedModel(num_heads=24)
CLUSTER, UNHIDDEN = knapformer.Cluster(fixed_s=0), knapformer.Cluster(overlaps_attention=False)
TRUE_GAMMAS, PLANNED_GAMMAS = (0.25, 0.41, 0.7, 1.0), (0.25, 0.41, 1.0)
TOPOLOGIES = ("g4n8", "g8n4", "g8/4/2/1n4", "g1n32")
NETWORKS = {  # GB/s inside a node of 8, between nodes
    "NVLink, 400 Gb/s": (120, 25),
    "NVLink, 100 Gb/s": (120, 6.25),
    "PCIe, 100 Gb/s": (17, 6.25),
    "PCIe, 25 Gb/s": (17, 1.5),
    "25 Gb/s everywhere": (1.5, 1.5),
}


def steps_of(mix: str, num_steps: int, micro_batches: int) -> list[Lengths]:
    """[step][rank]: consecutive batches of a mix."""
    data = knapformer.DataMix.parse(mix)
    steps = []
    for step in range(num_steps):
        batches = [data.draw_lengths(0, step * micro_batches + k, NUM_RANKS) for k in range(micro_batches)]
        steps.append([[length for batch in batches for length in batch[rank]] for rank in range(NUM_RANKS)])
    return steps


def gamma_rows(num_steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for mix, micro_batches, topology in itertools.product(("low", "mixed", "joint"), (1, 4), TOPOLOGIES):
        steps = steps_of(mix, num_steps, micro_batches)
        how: Any = {"topology": topology, "d_model": D_MODEL, "micro_batches": micro_batches}
        how |= {"cluster": CLUSTER, "model": MODEL}
        plans = {g: [knapformer.plan(step, gamma=g, **how) for step in steps] for g in {*TRUE_GAMMAS, *PLANNED_GAMMAS}}
        row: dict[str, object] = {"mix": mix, "micro_batches": micro_batches, "topology": topology}
        cells = []
        for true in TRUE_GAMMAS:
            paid = {g: sum(plan.on(gamma=true).predicted_time for plan in planned) for g, planned in plans.items()}
            over = {g: paid[g] / paid[true] for g in PLANNED_GAMMAS}
            rows.append(row | {"true_gamma": true, "over": over})
            cells.append("/".join(f"{value:.3f}" for value in over.values()))
        print(f"| {mix} | {micro_batches} | {topology} |", " | ".join(cells), "|", flush=True)
    return rows


def case_of(planning: PlanCost, steps: Sequence[Lengths], micro_batches: int, limit: int = 0) -> DrawnSteps:
    batches = [micro_batches_of_step(step, micro_batches) for step in steps]
    return DrawnSteps(planning, batches, [length for step in steps for lens in step for length in lens], 0, limit)


def speed_ups(planning: PlanCost, steps: Sequence[Lengths], micro_batches: int = 1) -> dict[str, float]:
    """The speed-up of each alternative over no balancing; of several topologies of bags the best one counts."""
    case = case_of(planning, steps, micro_batches)
    results = [simulate(alternative, case) for alternative in alternatives(case, sharing(ranked(case)))]
    found: dict[str, float] = {}
    for result in results:
        name = "bags" if result.alternative.key.startswith("bags") else result.alternative.name
        found[name] = max(found.get(name, 0), gain(result, results[0])[0])
    return found


def planning_of(node: float = 120, network: float = 25, **model: object) -> PlanCost:
    cluster = CLUSTER.replace(node_bytes_per_s=node * 1e9, network_bytes_per_s=network * 1e9)
    model_of = MODEL.replace(routed=False, **model)
    return PlanCost(d_model=D_MODEL, gamma=0.41, cluster=cluster, model=model_of, effort="low")


def network_rows(num_steps: int) -> list[dict[str, object]]:
    print("|", " | ".join(speed_ups(planning_of(), steps_of("low", 1, 1))), "|")
    rows: list[dict[str, object]] = []
    for mix in ("mixed", "joint"):
        for micro_batches in (1, 4):
            for name, (node, network) in NETWORKS.items():
                found = speed_ups(planning_of(node, network), steps_of(mix, num_steps, micro_batches), micro_batches)
                rows.append({"mix": mix, "micro_batches": micro_batches, "network": name, "speed_up": found})
                print(f"| {mix} | {micro_batches} | {name} | {cells_of(found)} |", flush=True)
    return rows


def losing_rows(num_steps: int) -> list[dict[str, object]]:
    rng = random.Random(0)

    def drawn(length: Callable[[], int], count: int) -> list[Lengths]:
        return [[[length() for _ in range(count)] for _ in range(NUM_RANKS)] for _ in range(num_steps)]

    cases = {
        "all 4,096 tokens": (planning_of(), drawn(lambda: 4096, 2)),
        "4,096 tokens, 5 % up or down": (planning_of(), drawn(lambda: rng.randint(3891, 4301), 2)),
        "256 tokens, 64 a rank": (planning_of(), drawn(lambda: rng.randint(200, 312), 64)),
        "one of 100,000 tokens on each rank": (planning_of(), drawn(lambda: rng.randint(95_000, 105_000), 1)),
        "joint on 25 Gb/s everywhere": (planning_of(1.5, 1.5), steps_of("joint", num_steps, 1)),
        "joint, 0.2e9 parameters, 12 blocks": (
            planning_of(num_blocks=12, num_parameters=0.2e9), steps_of("joint", num_steps, 1),
        ),
    }  # fmt: skip
    rows: list[dict[str, object]] = []
    for name, (planning, steps) in cases.items():
        found = speed_ups(planning, steps)
        flat = {
            topology: statistics.fmean(
                planning.plan(step, topology, routed=True, effort="default").predicted_time for step in steps
            )
            for topology in ("g8n4", "g8/4/2/1n4")
        }
        home = statistics.fmean(planning.home(step).predicted_time for step in steps)
        found |= {f"forced {topology}": home / seconds for topology, seconds in flat.items()}
        rows.append({"data": name, "speed_up": found})
        print(f"| {name} | {cells_of(found)} |", flush=True)
    return rows


def caps_rows(num_steps: int) -> list[dict[str, object]]:
    """The speed-up that is left where a rank can hold few tokens, over no balancing without such a limit."""
    rows: list[dict[str, object]] = []
    for micro_batches in (1, 4):
        steps = steps_of("joint", num_steps, micro_batches)
        free = case_of(planning_of(), steps, micro_batches)
        home = simulate(alternatives(free, [])[0], free)
        for cap in (32_000, 26_000, 16_000, 12_500, 12_000):
            case = case_of(planning_of(), steps, micro_batches, cap)
            found: dict[str, float] = {}
            for alternative in alternatives(case, sharing(ranked(case), 3)):
                result = simulate(alternative, case)
                if alternative.key == "sampler" or alternative.topology:
                    name = "bags" if alternative.key.startswith("bags") else alternative.name
                    fits = result.problem is None
                    found[name] = max(found.get(name, 0), gain(result, home)[0] if fits else 0)
            rows.append({"cap": cap, "micro_batches": micro_batches, "speed_up": found})
            cells = " | ".join(f"{value:.2f}" if value else "does not fit" for value in found.values())
            print(f"| {cap:,} | {micro_batches} | {cells} |", flush=True)
    return rows


def cells_of(found: dict[str, float]) -> str:
    return " | ".join(f"{value:.2f}" for value in found.values())


def parts_rows(_: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for workload in WORKLOADS:
        nested = f"g8/4/2/1n{workload.num_ranks // 8}"
        drawn = [workload.lengths(seed) for seed in range(12 if workload.num_ranks <= 64 else 1)]

        def plan(lengths: Lengths, topology: str, **how: Any) -> knapformer.Plan:
            return knapformer.plan(lengths, topology, d_model=D_MODEL, gamma=workload.gamma, **how)  # noqa: B023

        def evened(plan: knapformer.Plan) -> knapformer.Plan:
            content = json.loads(plan.to_json())
            lengths = [length for lens in plan.seq_lens for length in lens]
            ranks = zip(plan.first_rank_of_sequence, plan.degree_of_sequence, lengths, strict=True)
            content["chunk_lens_of_sequence"] = [list(even(*place).chunk_lens) for place in ranks]
            return knapformer.Plan.from_json(json.dumps(content))

        plans = [plan(lengths, nested) for lengths in drawn]
        without = {
            "annealing": lambda i: plan(drawn[i], nested, effort="low").predicted_time,  # noqa: B023
            "uneven chunks": lambda i: evened(plans[i]).predicted_time,  # noqa: B023
            "overlap": lambda i: plan(drawn[i], nested, cluster=UNHIDDEN).predicted_time,  # noqa: B023
        }
        saved = {
            name: statistics.fmean(p.predicted_time / of(i) - 1 for i, p in enumerate(plans))
            for name, of in without.items()
        }
        saved["gap"] = statistics.fmean(plan.gap for plan in plans)
        rows.append({"workload": workload.name, "gamma": workload.gamma, **saved})
        print(f"| {workload.name} {workload.gamma} |", " | ".join(f"{value:+.1%}" for value in saved.values()), "|")
    return rows


def clips_rows(num_steps: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for clip, ranks, heads in (
        (250_000, 32, 24),
        (500_000, 32, 24),
        (1_000_000, 64, 24),
        *((250_000, 8, n) for n in (12, 30, 32)),
    ):
        topology = "g" + "/".join(str(ranks >> i) for i in range(ranks.bit_length())) + "n1"
        over: dict[bool, list[float]] = {False: [], True: []}
        for seed in range(num_steps):
            draw = random.Random(seed)
            lengths = [[draw.randint(1024, 16_384) for _ in range(4)] + [clip] * (rank == 0) for rank in range(ranks)]
            for cuts_queries, of in over.items():
                model = knapformer.TrainedModel(num_heads=heads, cuts_queries=cuts_queries)
                plan = knapformer.plan(lengths, topology, d_model=D_MODEL, model=model)
                of.append(knapformer.predict_micro_batch(plan).over_ideal)
        row = {"heads alone": statistics.fmean(over[False]), "heads x queries": statistics.fmean(over[True])}
        rows.append({"clip": clip, "ranks": ranks, "heads": heads, **row})
        print(f"| {clip:,} | {topology} | {heads} | {cells_of(row)} |", flush=True)
    return rows


PARTS = {
    "gamma": (gamma_rows, "mix, micro-batches, topology; for each true gamma the cost of planning at 0.25/0.41/1.0"),
    "network": (network_rows, "mix, micro-batches, network; alternatives of doctor"),
    "losing": (losing_rows, "data; the same, and the balancer with a topology that is not chosen for the data"),
    "caps": (caps_rows, "tokens that a rank holds, micro-batches; sampler, bags"),
    "parts": (parts_rows, "workload; saved by annealing, uneven chunks, overlap; gap"),
    "clips": (clips_rows, "tokens, topology, heads; step over ideal by heads alone, by heads x queries"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=10, help="of each row")
    parser.add_argument("--part", choices=PARTS, help="alone (default: all)")
    args = parser.parse_args()
    rows: dict[str, list[dict[str, object]]] = {}
    for name, (rows_of, heading) in PARTS.items():
        if args.part in (None, name):
            print(f"{name}: {heading}")
            rows[name] = rows_of(args.steps)
    if args.json:
        settings = {"d_model": D_MODEL, "ranks": NUM_RANKS, "steps": args.steps}
        write_results(args.json, "sensitivity", settings, **rows)


if __name__ == "__main__":
    main()
