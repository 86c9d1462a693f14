"""Whether the models, the balancer and compiled attention compute on the device what float64 does on the CPU.

The reference: the plain model in float64 on the CPU, without a balancer, on each rank's own samples; gradients added up
over the ranks. Weights and inputs are those of the device, rounded to its dtype. Differences are relative, in norm: of
the outputs, and of all gradients together.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import traceback
from collections.abc import Callable
from typing import Any

from driver import Check, at_most, on_ranks
from settings import (
    Agenda,
    backend_of,
    correctness_ranks,
    merged_results,
    nested_topology,
    rank_device,
    seconds_left,
    sizes_of,
)

# They allow for the rounding of a few blocks, and products in TF32 (10 bits). Wrong results are off by a tenth or more.
LIMITS = {"fp32": 2e-3, "bf16": 5e-2}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """In the order of what matters first: the exchanges of several ranks, the models alone, and last what is compiled,
    which takes longest. An error in one of them does not keep the others from running."""
    num_ranks = correctness_ranks(args)
    parts, errors = list[dict[str, Any]](), list[Exception]()

    def check(check_rank: Callable[[argparse.Namespace], dict[str, Any]], on: int) -> None:
        try:
            parts.append(on_ranks(check_rank, args, on, backend_of(args, on), seconds_left(args)))
        except TimeoutError:
            raise
        except Exception as error:
            traceback.print_exc()
            errors.append(error)

    check(check_models, num_ranks)
    check(check_models, 1)
    check(check_compiled, num_ranks)
    check(check_compiled, 1)
    if errors:
        raise errors[0]
    left_out = [thing for part in parts for thing in part["left_out"]]
    return (
        {"num_ranks": num_ranks, "backend": backend_of(args, num_ranks)}
        | merged_results(*parts)
        | {"left_out": left_out}
    )


def check_models(args: argparse.Namespace) -> dict[str, Any]:
    """One rank runs without a balancer too; several run in a bag that shares every sequence, and in nested bags that
    share some of them."""
    import torch.distributed as dist

    topologies = (
        (None, *_bags_of(dist.get_world_size())) if dist.get_world_size() == 1 else _bags_of(dist.get_world_size())
    )
    agenda, checks = Agenda(args), list[Check]()
    for name, dtype in itertools.product(sizes_of(args).models, LIMITS):
        runs = [_Run(topology, checkpointed) for topology in topologies for checkpointed in (False, True)]
        _check_model(args, name, dtype, runs, agenda, checks)
    return {"checks": checks, **agenda.result()}


def check_compiled(args: argparse.Namespace) -> dict[str, Any]:
    """Compiled attention; on one rank compiled models too, in bfloat16, the dtype whose kernels are fused."""
    import torch.distributed as dist

    device, topology = rank_device(args), _bags_of(dist.get_world_size())[-1]
    agenda, checks = Agenda(args), list[Check]()
    for dtype in LIMITS:
        name = f"compiled attention, {topology}, {dtype}"
        if agenda.begins(name):
            checks += _checks(name, dtype, compiled_errors(topology, sizes_of(args).compiler, dtype, device))
            agenda.keep({"checks": checks})
    for name in sizes_of(args).compiled if dist.get_world_size() == 1 else ():
        _check_model(args, name, "bf16", [_Run(None, checkpointed=False, compiled=True)], agenda, checks)
    return {"checks": checks, **agenda.result()}


def _bags_of(num_ranks: int) -> tuple[str, ...]:
    """A flat bag of all ranks, and a nested one where it is another."""
    return tuple(dict.fromkeys((f"g{num_ranks}n1", nested_topology(num_ranks))))


@dataclasses.dataclass(frozen=True)
class _Run:
    topology: str | None  # None: without a balancer
    checkpointed: bool
    compiled: bool = False

    def name(self, model: str, dtype: str) -> str:
        words = [model, self.topology or "plain", dtype]
        return ", ".join([*words, *["checkpointed"] * self.checkpointed, *["compiled"] * self.compiled])


def _check_model(
    args: argparse.Namespace, name: str, dtype_name: str, runs: list[_Run], agenda: Agenda, checks: list[Check]
) -> None:
    import torch
    import torch.distributed as dist
    from knapformer.adapters.named import build_model, load_config, random_batch
    from knapformer.models.parallel import DTYPES, init_weights, set_checkpointing

    from knapformer import Sample, SequenceBalancer

    device, rank, num_ranks, dtype = rank_device(args), dist.get_rank(), dist.get_world_size(), DTYPES[dtype_name]

    @functools.cache
    def prepared() -> tuple[Any, Any, Any, Any]:
        torch.manual_seed(0)  # the same weights on all ranks
        config = load_config(name)
        samples = [config.possible(Sample(*size)) for size in sizes_of(args).samples[rank::num_ranks]]
        batch, target = random_batch(config, samples, rank, device, dtype)
        model, reference = build_model(config, dtype), build_model(config, torch.float64)
        init_weights(model)
        with torch.no_grad():
            for of_reference, parameter in zip(reference.parameters(), model.parameters(), strict=True):
                of_reference.copy_(parameter)
        expected = _outcome(reference, _on_cpu_in_double(batch), target.cpu().double(), None)
        return model.to(device), batch, target, expected

    for run in runs:
        run_name = run.name(name, dtype_name)
        if not agenda.begins(run_name, _COMPILING_S if run.compiled and device.type == "cuda" else 0.0):
            continue
        model, batch, target, expected = prepared()
        set_checkpointing(model, run.checkpointed)
        computed = model
        if run.compiled:
            computed = copy.deepcopy(model)
            for blocks in computed.block_lists():  # blocks of a list are alike
                blocks[0].compile(backend=sizes_of(args).compiler, dynamic=True)
        balancer = None if run.topology is None else SequenceBalancer(run.topology, mask=load_config(name).mask)
        failed = None
        try:
            differences = _differences(_outcome(computed, batch, target, balancer), expected)
        except Exception as error:
            if num_ranks > 1:
                raise  # the others wait for this one
            traceback.print_exc()
            differences, failed = [_NO_NUMBER, _NO_NUMBER], error
        checks += _checks(run_name, dtype_name, differences, failed)
        agenda.keep({"checks": checks})


_NO_NUMBER = 1e30  # the difference of a run that raised, or whose results are infinite or undefined
_COMPILING_S = 40.0  # a model's blocks, forward and backward, by Inductor


def _outcome(model: Any, batch: Any, target: Any, balancer: Any) -> tuple[Any, Any]:
    """The output of this rank's samples, and the gradients of all parameters, added up over the ranks; on the CPU."""
    import torch
    import torch.distributed as dist

    model.zero_grad(set_to_none=True)
    output = model(batch, balancer)
    (output - target).square().mean().backward()
    gradients = torch.cat([parameter.grad.detach().flatten().cpu().double() for parameter in model.parameters()])
    dist.all_reduce(gradients)
    return output.detach().cpu().double(), gradients


def _on_cpu_in_double(batch: Any) -> Any:
    """The batch on the CPU, with its floating-point tensors in float64."""
    import torch
    from torch.utils._pytree import tree_map_only

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()

    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return type(batch)(**tree_map_only(torch.Tensor, moved, fields))


def _differences(computed: tuple[Any, Any], expected: tuple[Any, Any]) -> list[float]:
    """Relative differences, each from the rank where it is largest."""
    import torch
    import torch.distributed as dist

    ratios = [((a - b).norm() / b.norm()) for a, b in zip(computed, expected, strict=True)]
    worst = torch.stack(ratios).nan_to_num(nan=_NO_NUMBER, posinf=_NO_NUMBER)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def _checks(name: str, dtype: str, differences: list[float], failed: Exception | None = None) -> list[Check]:
    return [
        {"name": f"{name}: {of}", "correctness": True, **at_most(difference, LIMITS[dtype]), **_reason(failed)}
        for of, difference in zip(("outputs", "gradients"), differences, strict=True)
    ]


def _reason(failed: Exception | None) -> dict[str, str]:
    """Why a check has no number, for its result."""
    return {} if failed is None else {"error": (str(failed).strip().splitlines() or [type(failed).__name__])[0]}


HEADS, HEAD_DIM = 8, 16  # of compiled attention


def compiled_errors(topology: str, compiler: str, dtype_name: str, device: Any) -> list[float]:
    """Differences of a compiled graph, forward and backward, that holds attention and both of its exchanges."""
    import torch
    import torch.distributed as dist
    from knapformer.compile import AttentionTables
    from knapformer.models.parallel import DTYPES

    from knapformer import SequenceBalancer

    rank, width, dtype = dist.get_rank(), HEADS * HEAD_DIM, DTYPES[dtype_name]
    lens = [[40, 3, 9], [17], [64, 8], [5, 5]][rank % 4]
    x = torch.randn(sum(lens), width, generator=torch.Generator().manual_seed(rank)).to(dtype)
    weight = (torch.randn(width, 3 * width, generator=torch.Generator().manual_seed(99)) * width**-0.5).to(dtype)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(sequence[:, None] != sequence, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    def sequences(seq_lens: torch.Tensor) -> torch.Tensor:
        return torch.repeat_interleave(torch.arange(seq_lens.numel()), seq_lens.long()).to(device)

    def block(x: torch.Tensor, weight: torch.Tensor, tables: AttentionTables) -> torch.Tensor:
        q, k, v = (x @ weight).unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        return tables.attention(q, k, v, attend).flatten(1)

    def outcome(weight: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output.square().sum().backward()
        gradient = weight.grad.detach().cpu().double()
        dist.all_reduce(gradient)
        return output.detach().cpu().double(), gradient

    of_reference = weight.double().requires_grad_()
    q, k, v = (x.double() @ of_reference).unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
    own = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(lens))
    expected = outcome(of_reference, attend(q, k, v, own).flatten(1))

    balancer = SequenceBalancer(topology)
    balancer.plan_routing(lens, width)
    on_device = weight.to(device).requires_grad_()
    _, y, _ = balancer.route(x.to(device))
    tables = AttentionTables.of(balancer, y.device, layout=sequences)
    y = torch.compile(block, fullgraph=True, dynamic=True, backend=compiler)(y, on_device, tables)
    return _differences(outcome(on_device, balancer.reverse_route(y)[1]), expected)
