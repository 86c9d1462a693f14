"""What to change, in code: a template for each case, all of which tests run. Free names are the user's own."""

from __future__ import annotations

from knapformer.tools.baselines import Alternative
from knapformer.tools.model_presets import Preset
from knapformer.tools.rank_lengths import has_masks
from knapformer.tools.ways import DrawnSteps

_SAMPLER = """\
sampler = knapformer.BalancedBatchSampler(lengths, batch_size={size}, micro_batches={K}, {cost}{masks})
for samples in torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=list):
    predictions = model(samples)"""
_SAMPLER_DIFFUSERS = "model = knapformer.balance(transformer)  # diffusers' {transformer}\n" + _SAMPLER
_BALANCER = """\
balancer = knapformer.SequenceBalancer("{topology}", {cost})
balancer.plan_routing(seq_lens{masks})
_, x, _ = balancer.route(x)
x = model(x)  # in each block o = balancer.attention(q, k, v)
_, x = balancer.reverse_route(x)"""
_BALANCER_STEP = """\
balancer = knapformer.SequenceBalancer("{topology}", {cost})
plan = balancer.plan_routing(seq_lens{masks}, micro_batches={K})  # of a whole step
for k in range({K}):
    balancer.follow(plan, k)
    _, x, _ = balancer.route(pack([samples[i] for i in plan.home_sequences(balancer.rank, k)]))
    x = model(x)  # in each block o = balancer.attention(q, k, v)
    _, x = balancer.reverse_route(x)"""
_BALANCER_DIFFUSERS = """\
balancer = knapformer.SequenceBalancer("{topology}", {cost})
knapformer.balance(transformer, balancer)  # diffusers' {transformer}
predictions = transformer(samples)  # a list"""
_BALANCER_DIFFUSERS_STEP = """\
balancer = knapformer.SequenceBalancer("{topology}", {cost})
knapformer.balance(transformer, balancer)  # diffusers' {transformer}
plan = balancer.plan_routing(seq_lens, micro_batches={K})  # of a whole step
for k in range({K}):
    balancer.follow(plan, k)
    predictions = transformer([samples[i] for i in plan.home_sequences(balancer.rank, k)], planned=True)"""


def code_of(taken: Alternative, draw: DrawnSteps, preset: Preset) -> str:
    """'' where the alternative is not this project's."""
    planning, masks = draw.planning, has_masks([draw.pool])
    diffusers = bool(preset.transformer) and not masks and planning.mask == "full"  # which adapters compute
    if taken.key == "sampler":
        template = _SAMPLER_DIFFUSERS if diffusers else _SAMPLER
    elif not taken.topology:
        return ""
    elif draw.micro_batches == 1:
        template = _BALANCER_DIFFUSERS if diffusers else _BALANCER
    else:
        template = _BALANCER_DIFFUSERS_STEP if diffusers else _BALANCER_STEP
    mask = "full" if masks else planning.mask
    cost = f"d_model={planning.d_model}, gamma={planning.gamma:.3g}, mask={mask!r}"
    cost += f", max_tokens_per_rank={draw.max_tokens_per_rank}"  # 0: none
    if taken.topology and planning.model.num_heads % taken.degree:
        cost += f", model=knapformer.TrainedModel(num_heads={planning.model.num_heads}, cuts_queries=True)"
    return template.format(
        topology=taken.topology, cost=cost, masks=", masks=masks" if masks else "", transformer=preset.transformer,
        size=max(1, round(draw.batch_size)), K=draw.micro_batches,
    )  # fmt: skip
