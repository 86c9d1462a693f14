"""Compares packed calls of a diffusers model with its own calls: cost on samples of one size, gain on padded captions.

    PYTHONPATH=python python bench/bench_adapters.py [--device cuda] [--json FILE] [--rounds 7] [--d-model 512]

Each round runs both calls, forward and backward, one after the other on the same model. A ratio is the median of the
rounds' ratios, so that a drift of the machine's speed affects both calls alike. On the CPU times are processor seconds
of one thread, which other processes on the machine change little; models are narrow there. On CUDA both calls take
flash attention: in diffusers' own call, cuDNN's, which torch 2.11 chooses on an H200, ends in an illegal memory access
in the backward pass. What is compared, for each class of diffusers that has an adapter, with the small model of
`knapformer.adapters.check` made as wide as --d-model:

equal    four samples of one size, without padding: diffusers' own call with a batch of four
captions captions of 20 to 512 tokens: diffusers' own call with captions padded to 512, masked where the model takes
         masks. Then the packed call gets the same arguments, and `off` says how far the two losses are apart. Without
         masks padding takes part in diffusers' result. Z-Image takes lists, and pads and masks them itself
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import diffusers
import torch
import torch.utils._pytree as pytree
from driver import parser_of, write_results
from knapformer.adapters import names
from knapformer.adapters.parity import Size, SmallModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import knapformer

CAPTIONS = (20, 77, 200, 512)
MASKS = ("attention_mask", "states_mask", "attention_mask_2")
SAME = {"cpu": 1e-5, "cuda": 2e-2}  # at most so far apart: float32, bfloat16
Sample = dict[str, Any]
GOALS = {"equal": 1.03, "captions": 1.0}  # at most so many of diffusers' seconds


def wide(class_name: str, d_model: int, head_dim: int) -> SmallModel:
    """The small model, with the fields that it has of these."""
    heads, turned = d_model // head_dim, head_dim // 4
    widths = dict.fromkeys(("dim", "hidden_size", "caption_projection_dim", "cross_attention_dim"), d_model)
    widths |= dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads"), heads)
    widths |= dict.fromkeys(("ffn_dim", "intermediate_size"), 4 * d_model)
    widths |= {"attention_head_dim": head_dim, "rope_freq_dim": head_dim // 8, "pos_embed_max_size": 192}
    widths["axes_lens"] = [4096, 256, 256]
    widths |= {"audio_num_attention_heads": heads // 2, "audio_attention_head_dim": head_dim}
    widths["audio_cross_attention_dim"] = heads // 2 * head_dim
    axes = {3: [turned, 3 * turned // 2, 3 * turned // 2], 4: [turned] * 4}
    model = SmallModel(getattr(diffusers, class_name))
    small = model.fields
    widths["num_layers"] = 1 if "num_single_layers" in small else 4
    fields = {name: value for name, value in widths.items() if name in small}
    fields |= {
        name: axes[len(small[name])] for name in ("axes_dims_rope", "axes_dims", "rope_axes_dim") if name in small
    }
    return SmallModel(getattr(diffusers, class_name), **fields)


def samples_of(small: SmallModel, side: int, captions: Sequence[int]) -> tuple[list[Sample], list[Sample]]:
    """Samples with captions of so many tokens for a packed call, and for diffusers' with its padding: the same ones
    where the model has masks or takes lists."""
    packed, padded, longest = [], [], max(captions)
    masks = [name for name in (*small.adapter.required, *small.adapter.optional) if name.endswith(MASKS)]
    for seed, num_text in enumerate(captions):
        own, full = (small.sample(Size((1, side, side), count), seed) for count in (num_text, longest))
        full |= {name: value for name, value in (padded or [full])[0].items() if not of_samples(value)}
        for name in masks:
            length = full["encoder_hidden_states"].shape[1]  # in some masks tokens of the picture follow
            full[name] = torch.ones_like(full.get(name, torch.ones(1, length, dtype=torch.bool)))
            full[name][:, num_text + length - longest : length] = 0
        if "cap_feats" in full:
            full["cap_feats"] = [text[:num_text] for text in full["cap_feats"]]
        packed.append(full if masks or "cap_feats" in full or num_text == longest else own)
        padded.append(full)
    return packed, padded


def of_samples(value: Any) -> bool:
    """Whether an argument has a row or an item for each sample, and is not of the whole batch."""
    return isinstance(value, list) or (isinstance(value, Tensor) and len(value) == 1)


def batch_of(samples: Sequence[Sample]) -> Sample:
    batch = dict(samples[0])
    for name in filter(lambda name: of_samples(batch[name]), batch):
        rows = [sample[name] for sample in samples]
        batch[name] = torch.cat(rows) if isinstance(rows[0], Tensor) else [*itertools.chain(*rows)]
    return batch


def seconds(compute: Callable[[], Tensor], device: str) -> float:
    if device == "cpu":
        begin = time.process_time()
        compute().backward()
        return time.process_time() - begin
    torch.cuda.synchronize()
    begin = time.perf_counter()
    compute().backward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def compare(model: Any, packed: Sequence[Sample], padded: Sequence[Sample], arguments: Any) -> dict[str, float]:
    batch, num_visual = batch_of(padded), arguments.side**2

    def loss(outputs: Any) -> Tensor:
        """Of Qwen-Image 2.1, which returns rows of text, too, the last ones are of the picture."""
        leaves = [leaf[:, -num_visual:] for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        return torch.cat([leaf.flatten() for leaf in leaves]).square().mean()

    ways = {"packed": lambda: loss(list(model(packed))), "diffusers": lambda: loss(model(**batch))}
    with torch.no_grad():
        of_packed, of_padded = (float(way()) for way in ways.values())
    for way in ways.values():
        seconds(way, arguments.device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name in sorted(ways, reverse=number % 2 == 0):  # each goes first in every second round
            taken[name].append(seconds(ways[name], arguments.device))
            model.zero_grad()
    ratios = [a / b for a, b in zip(taken["packed"], taken["diffusers"], strict=True)]
    return {
        "packed_s": statistics.median(taken["packed"]),
        "diffusers_s": statistics.median(taken["diffusers"]),
        "ratio": statistics.median(ratios),
        "off": abs(of_packed / of_padded - 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--classes", nargs="*", metavar="NAME", help="the default is all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--d-model", type=int, help="default 512 on the CPU, FLUX's 3072 on CUDA")
    parser.add_argument("--side", type=int, help="a sample has side * side visual tokens; default 16 or 64")
    arguments = parser.parse_args()
    is_cpu = arguments.device == "cpu"
    arguments.side = arguments.side or (16 if is_cpu else 64)
    d_model, head_dim = arguments.d_model or (512 if is_cpu else 3072), 64 if is_cpu else 128
    dtype = torch.float32 if is_cpu else torch.bfloat16
    if is_cpu:
        torch.set_num_threads(1)
    torch.manual_seed(0)

    def on_device(name: str, value: Any) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            is_position = name.endswith("ids") or not tensor.is_floating_point()
            return tensor.to(arguments.device, None if is_position else dtype)

        return pytree.tree_map_only(Tensor, moved, value)

    comparisons = {}
    for class_name in arguments.classes or [name for name in names() if "." not in name]:
        of_class = wide(class_name, d_model, head_dim)
        model = knapformer.balance(of_class.make().to(arguments.device, dtype))
        for case, captions in {"equal": (128,) * 4, "captions": CAPTIONS}.items():
            packed, padded = samples_of(of_class, arguments.side, captions)
            moved = (
                [{name: on_device(name, value) for name, value in s.items()} for s in of] for of in (packed, padded)
            )
            figures = compare(model, *moved, arguments) | {"goal": GOALS[case]}
            if packed[0] is padded[0] and not (off := figures["off"]) <= SAME[arguments.device]:
                raise RuntimeError(f"{class_name} {case}: losses are {off:.1e} apart, expected the same")
            comparisons[f"{class_name} {case}"] = figures
            print(class_name, case, {key: float(f"{value:.3g}") for key, value in figures.items()}, flush=True)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        write_results(arguments.json, "adapters", options | {"captions": CAPTIONS}, comparisons=comparisons)


if __name__ == "__main__":
    main()
