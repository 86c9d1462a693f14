"""Attention by planned masks on a device, beside float64 on the CPU with each sequence whole: an item of gpu.py.

On accelerators this is FlexAttention; with full masks alone the variable-length kernel. On two ranks 3 heads are cut by
queries as well; keys of full masks then travel in stages, whose outputs are merged by their log-sum-exps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

MASKS = (
    ("full", 500),
    ("c60 f400 c30 f200", 690),
    ("causal", 300),
    ("c10 clean:3x60 noisy:3x60", 370),
    ("window:64:0", 257),
)
HEADS, HEAD_DIM = 3, 64


def differences(device: Any, dtypes: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """What is compared, the name of its dtype, and the relative difference in norm, over all ranks."""
    import torch
    import torch.distributed as dist
    from knapformer.models import MaskedAttention

    from knapformer import Cluster, SequenceBalancer, TrainedModel

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    lens = [n for _, n in MASKS][rank::num_ranks]
    model = TrainedModel(num_heads=HEADS, num_kv_heads=HEADS, cuts_queries=True)
    cluster = Cluster(flops_per_s=1e9, node_bytes_per_s=1e6, node_latency_s=0)  # a slow link, so that stages pay
    balancer = SequenceBalancer(f"g{num_ranks}n1", d_model=HEADS * HEAD_DIM, model=model, cluster=cluster)
    drawn = torch.randn(
        sum(lens), 3, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    )
    for kinds, (name, dtype) in itertools.product(("full", "masks"), dtypes.items()):
        masks = [mask if kinds == "masks" else "full" for mask, _ in MASKS][rank::num_ranks]
        plan = balancer.plan_routing(lens, masks=masks)
        given = drawn.to(device, dtype).requires_grad_()
        exact = given.detach().cpu().double().requires_grad_()
        q, k, v = balancer.route(given.flatten(1))[1].unflatten(1, (3, HEADS, HEAD_DIM)).unbind(1)
        home = balancer.reverse_route(balancer.attention(q, k, v).flatten(1))[1].unflatten(1, (HEADS, HEAD_DIM))
        expected = MaskedAttention(lens, masks)(*exact.unbind(1))
        for output in (home, expected):
            output.double().square().sum().backward()
        pairs = (home, expected), (given.grad, exact.grad)
        ratios = torch.stack([(a.detach().cpu().double() - b).norm() / b.norm() for a, b in pairs])
        dist.all_reduce(ratios.nan_to_num_(nan=1e30), op=dist.ReduceOp.MAX)
        cut = f"{num_ranks} ranks, parts {plan.query_parts}, stages {plan.stages}"
        for of, value in zip(("outputs", "gradients"), ratios.tolist(), strict=True):
            yield f"{kinds}, {cut}, {of}", name, value
