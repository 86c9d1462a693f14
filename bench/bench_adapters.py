"""Compares packed calls of a diffusers model with its own calls: cost on samples of one size, gain on padded captions.

    PYTHONPATH=python python bench/bench_adapters.py [--device cuda] [--json FILE] [--rounds 7] [--d-model 512]

Each round runs both calls, forward and backward, one after the other on the same model. A ratio is the median of the
rounds' ratios, so that a drift of the machine's speed affects both calls alike. On the CPU times are processor seconds
of one thread, which other processes on the machine change little; models are narrow there. On CUDA both calls take
flash attention: in diffusers' own call, cuDNN's, which torch 2.11 chooses on an H200, ends in an illegal memory access
in the backward pass. What is compared, for each class of diffusers that has an adapter, with the small model of
`knapformer.adapters.check` made as wide as --d-model, and its conditions without padding:

equal    four samples of one size: diffusers' own call with a batch of four
captions for FLUX and Wan, captions of 20 to 512 tokens: diffusers' own call with captions padded to 512
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
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
PADDED = ("FluxTransformer2DModel", "WanTransformer3DModel")
GOALS = {"equal": 1.03, "captions": 1.0}  # at most so many of diffusers' seconds


def wide(class_name: str, d_model: int, head_dim: int) -> SmallModel:
    """The small model, with the fields that it has of these."""
    heads, turned = d_model // head_dim, head_dim // 4
    widths = dict.fromkeys(("dim", "hidden_size", "caption_projection_dim", "cross_attention_dim"), d_model)
    widths |= dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads", "n_kv_heads"), heads)
    widths |= dict.fromkeys(("ffn_dim", "intermediate_size"), 4 * d_model)
    widths |= {"attention_head_dim": head_dim, "rope_freq_dim": head_dim // 8, "pos_embed_max_size": 192}
    widths["axes_lens"] = [2048, 256, 256]
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


def unmasked(sample: dict[str, Any]) -> dict[str, Any]:
    hides = ("attention_mask", "states_mask", "attention_mask_2")
    return {name: torch.ones_like(v) if v is not None and name.endswith(hides) else v for name, v in sample.items()}


def batch_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """One batch, captions filled with zeros; arguments without a dimension of samples are those of the longest."""
    num_text = [
        sample["encoder_hidden_states"].shape[1] if "encoder_hidden_states" in sample else 0 for sample in samples
    ]
    batch = {}
    for name, value in samples[num_text.index(max(num_text))].items():
        rows = [sample[name] for sample in samples]
        if name == "encoder_hidden_states":
            rows = [torch.nn.functional.pad(row, (0, 0, 0, value.shape[1] - row.shape[1])) for row in rows]
        of_samples = isinstance(value, Tensor) and len(value) == 1
        batch[name] = torch.cat(rows) if of_samples else [*itertools.chain(*rows)] if isinstance(value, list) else value
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
def compare(model: Any, samples: list[dict[str, Any]], arguments: Any) -> dict[str, float]:
    batch, device = batch_of(samples), arguments.device

    def squares(outputs: Any) -> Tensor:
        leaves = (leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor))
        return sum((leaf.square().mean() for leaf in leaves), torch.zeros((), device=device))

    ways = {"packed": lambda: squares(list(model(samples))), "diffusers": lambda: squares(model(**batch))}
    for way in ways.values():
        seconds(way, device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        for name in sorted(ways, reverse=number % 2 == 0):  # each goes first in every second round
            taken[name].append(seconds(ways[name], device))
            model.zero_grad()
    ratios = [a / b for a, b in zip(taken["packed"], taken["diffusers"], strict=True)]
    return {
        "packed_s": statistics.median(taken["packed"]),
        "diffusers_s": statistics.median(taken["diffusers"]),
        "ratio": statistics.median(ratios),
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
        cases = {"equal": (128,) * 4} | ({"captions": CAPTIONS} if class_name in PADDED else {})
        for case, captions in cases.items():
            sizes = [Size((1, arguments.side, arguments.side), num_text) for num_text in captions]
            drawn = [unmasked(of_class.sample(size, seed)) for seed, size in enumerate(sizes)]
            samples = [{name: on_device(name, value) for name, value in sample.items()} for sample in drawn]
            figures = compare(model, samples, arguments) | {"goal": GOALS[case]}
            comparisons[f"{class_name} {case}"] = figures
            print(class_name, case, {key: round(value, 3) for key, value in figures.items()}, flush=True)
    if arguments.json:
        options = {name: value for name, value in vars(arguments).items() if name != "json"}
        write_results(arguments.json, "adapters", options | {"captions": CAPTIONS}, comparisons=comparisons)


if __name__ == "__main__":
    main()
