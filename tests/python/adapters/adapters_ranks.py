"""What test_adapters_on_ranks.py runs on four ranks, in one group: two pairs at the same time, then all together."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from adapters.cases import Sample, cases, of
from exactness_ranks import CLUSTER
from knapformer.adapters.parity import SmallModel, gradients, sample_loss, shared, with_lora
from knapformer.adapters.registry import find_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import knapformer
from knapformer import SequenceBalancer

# By number of ranks, which of SIZES each rank has: one rank has none.
HOMES = {2: [[], [0, 1, 2, 3, 4]], 4: [[4], [], [0, 2], [1, 3]]}
TOPOLOGIES = {2: "g2/1n1", 4: "g4/2/1n1"}
FROZEN, ADAPTED, COMPILED, HYBRID, TENSOR_PARALLEL = "frozen", "adapted", "compiled", "hybrid", "tensor parallel"
WRAPPED = "wrapped in FSDP1"
FLUX = cases()["flux"]
TENSOR_PARALLEL_CASE = of("FluxTransformer2DModel", num_attention_heads=4, num_layers=1)
COMPILED_CASE = of("FluxTransformer2DModel", num_layers=0, num_single_layers=1)
Outcome = tuple[list[int], list[Any], dict[str, Tensor], int]  # home, outputs, whole gradients, shared sequences


def samples_of(case: SmallModel) -> list[Sample]:
    return case.samples()


def outcome_of(
    model: nn.Module, case: SmallModel, home: list[int], num_ranks: int, balancer: SequenceBalancer, call: nn.Module
) -> Outcome:
    """call: the model, or what wraps it. FSDP and DDP take the mean over their num_ranks ranks."""
    samples = [samples_of(case)[index] for index in home]
    predictions = call(samples)
    loss = sum((sample_loss(p, s) for p, s in zip(predictions, samples, strict=True)), predictions.zero)
    (loss * num_ranks).backward()
    grads = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients(model).items()}
    shared = sum(degree > 1 for degree in balancer.plan.degree_of_sequence)
    return home, pytree.tree_map(torch.detach, list(predictions)), grads, shared


def sharded_and_balanced(mesh: DeviceMesh, balancer: SequenceBalancer) -> dict[str, Outcome]:
    """Under FSDP2 and diffusers' checkpointing, balanced before sharding or after."""
    outcomes = {}
    for i, (name, case) in enumerate(cases().items()):
        model = case.make()
        if i % 2 == 0:
            model.enable_gradient_checkpointing()
        if i % 3 == 0:
            case.balance(model, balancer)
        _shard(model, mesh)
        if i % 3 != 0:
            case.balance(model, balancer)
        home = HOMES[mesh.size()][mesh.get_rank() % mesh.size()]
        outcomes[name] = outcome_of(model, case, home, mesh.size(), balancer, call=model)
        assert all(isinstance(parameter.grad, DTensor) for parameter in model.parameters()), name
    return outcomes


def ddp_with_frozen_base(rank: int, pair: DeviceMesh) -> Outcome:
    """Only the query projections of attention train. One rank has all samples."""
    model = FLUX.make()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(".to_q." in parameter_name)
    balancer = SequenceBalancer(TOPOLOGIES[2], group=pair.get_group(), cluster=CLUSTER)
    wrapped = DistributedDataParallel(knapformer.balance(model, balancer), process_group=pair.get_group())
    return outcome_of(model, FLUX, HOMES[2][rank % 2], 2, balancer, call=wrapped)


class Adapted(SmallModel):
    def make(self) -> nn.Module:
        return with_lora(super().make(), self.adapter)


ADAPTED_CASE = Adapted(FLUX.model_class)


def ddp_with_adapters(rank: int, pair: DeviceMesh) -> Outcome:
    """Each rank is its own replica, so that one rank holds no token. Its gradients are zeros, but DDP's hooks must run
    there: else the other rank would wait."""
    model = ADAPTED_CASE.make()
    balancer = SequenceBalancer("g1n1", group=pair.get_group(), cluster=CLUSTER)
    wrapped = DistributedDataParallel(knapformer.balance(model, balancer), process_group=pair.get_group())
    outcome = outcome_of(model, ADAPTED_CASE, HOMES[2][rank % 2], 2, balancer, call=wrapped)
    assert balancer.plan.tokens_after[rank % 2] == (0 if rank % 2 == 0 else sum(balancer.plan.tokens_after))
    return outcome


def compiled(rank: int, pair: DeviceMesh) -> Outcome:
    """Traces forward and backward, under FSDP2. The default backend would add code generation, which takes minutes."""
    model = COMPILED_CASE.make()
    balancer = SequenceBalancer(TOPOLOGIES[2], group=pair.get_group(), cluster=CLUSTER)
    knapformer.balance(model, balancer)
    for block in _blocks(model):
        block.compile(dynamic=True, backend="aot_eager")
    _shard(model, pair)
    outcome = outcome_of(model, COMPILED_CASE, HOMES[2][rank % 2], 2, balancer, call=model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return outcome


def fully_sharded_data_parallel(rank: int, pair: DeviceMesh) -> Outcome:
    """FSDP1, whose modules stand in the place of blocks and model: balanced after it."""
    model, group = FLUX.make(), pair.get_group()
    policy = ModuleWrapPolicy({type(block) for block in _blocks(model)})
    wrapped = FullyShardedDataParallel(
        model, process_group=group, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    balancer = SequenceBalancer(TOPOLOGIES[2], group=group, cluster=CLUSTER)
    outcome = outcome_of(model, FLUX, HOMES[2][rank % 2], 2, balancer, call=knapformer.balance(wrapped, balancer))
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        whole = {name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in gradients(model).items()}
    return outcome[0], outcome[1], whole, outcome[3]


def hybrid_sharding(rank: int, mesh: DeviceMesh) -> Outcome:
    """Weights are sharded inside a node and replicated over nodes; bags lie inside a node, too."""
    balancer = SequenceBalancer("g2/1n2", cluster=CLUSTER)
    model = knapformer.balance(FLUX.make(), balancer)
    _shard(model, mesh)
    return outcome_of(model, FLUX, HOMES[4][rank], 4, balancer, call=model)


def tensor_parallel(rank: int, mesh: DeviceMesh) -> Outcome:
    """The layers of the double-stream blocks are split inside a node; the balancer's bags span the nodes."""
    case = TENSOR_PARALLEL_CASE
    data, layers = mesh["replicate"], mesh["shard"]
    balancer = SequenceBalancer("g2/1n1", group=data.get_group(), cluster=CLUSTER)
    model = knapformer.balance(case.make(), balancer)
    into = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
    plan = {name: ColwiseParallel() for name in (*into, "ff.net.0.proj", "ff_context.net.0.proj")}
    out_of = ("attn.to_out.0", "attn.to_add_out", "ff.net.2", "ff_context.net.2")
    plan |= {name: RowwiseParallel() for name in out_of}
    for block in model.transformer_blocks:
        parallelize_module(block, layers, plan)
    _shard(model, data)
    outcome = outcome_of(model, case, HOMES[2][rank // 2], 2, balancer, call=model)
    for name, gradient in outcome[2].items():
        if name.startswith("transformer_blocks") and ".attn.norm_" in name:  # of this rank's heads alone
            dist.all_reduce(gradient, group=layers.get_group())
    return outcome


def on_ranks(rank: int, world: int) -> dict[tuple[str, int], Outcome]:
    """Outcomes by name and number of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    pair = mesh["shard"]
    if rank < 2:
        of_pair = SequenceBalancer(TOPOLOGIES[2], group=pair.get_group(), cluster=CLUSTER)
        outcomes = {(name, 2): outcome for name, outcome in sharded_and_balanced(pair, of_pair).items()}
    else:
        for name, case in cases().items():
            assert shared(case, rank - 2, 2, group=pair.get_group()) == [], name
        outcomes = {
            (FROZEN, 2): ddp_with_frozen_base(rank, pair),
            (ADAPTED, 2): ddp_with_adapters(rank, pair),
            (COMPILED, 2): compiled(rank, pair),
            (WRAPPED, 2): fully_sharded_data_parallel(rank, pair),
        }
    of_all = SequenceBalancer(TOPOLOGIES[4], cluster=CLUSTER)
    for name, outcome in sharded_and_balanced(init_device_mesh("cpu", (world,)), of_all).items():
        outcomes[name, 4] = outcome
    outcomes[HYBRID, 4] = hybrid_sharding(rank, mesh)
    outcomes[TENSOR_PARALLEL, 4] = tensor_parallel(rank, mesh)
    return outcomes


def _shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Blocks, and what else accelerate makes units of; among these may be the layer that reads the samples."""
    names = getattr(find_model(model)[0], "_no_split_modules", None) or ()
    units = (module for module in model.modules() if type(module).__name__ in names)
    for module in dict.fromkeys([*_blocks(model), *units]):
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _blocks(model: nn.Module) -> list[nn.Module]:
    of, adapter = find_model(model)
    return [block for name in adapter.lists() for block in of.get_submodule(name)]
