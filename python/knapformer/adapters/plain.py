"""The plain transformer of knapformer.models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from knapformer._core import check_mask
from knapformer.adapters.adapter import Adapter, expect
from knapformer.adapters.chunks import Chunks, Home, Moved, Part, RunBlock
from knapformer.adapters.samples import Samples
from knapformer.attention.packed_rows import positions, rotations
from knapformer.models.transformer import TransformerBlock


class Plain(Adapter):
    required = ("hidden_states",)
    input_layer = "in_proj"
    blocks = ("blocks",)
    packed = {"TransformerBlock": TransformerBlock.forward}
    in_parts = ()
    block_counts = {"block": "num_blocks"}
    named_configs = {
        "transformer": {},
        "transformer-demo": {"num_blocks": 3, "d_model": 256, "num_heads": 4, "num_kv_heads": 4},
        "transformer-tiny": {
            "num_blocks": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "in_channels": 8, "out_channels": 6,
        },
    }  # fmt: skip

    @staticmethod
    def check_config(config: Any) -> None:
        heads, kv_heads, d_model = config.num_heads, config.num_kv_heads, config.d_model
        check_mask(config.mask)
        expect(d_model % heads == 0, "num_heads", heads, f"a divisor of d_model {d_model}")
        expect(d_model // heads % 2 == 0, "num_heads", heads, "an even d_model / num_heads, for the rotation of pairs")
        expect(heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of {heads} heads")

    @staticmethod
    def mask(model: Any) -> str:
        return str(model.mask)

    def embed(self, model: Any, samples: Samples) -> Home:
        x, seq_lens = samples.rows("hidden_states", model.in_proj.in_features)
        x = model.in_proj(x)
        return Home(x, seq_lens, [positions(seq_lens, x.device)])

    def compute(self, model: Any, moved: Moved, run: RunBlock) -> Tensor:
        step, x, (places,), _ = moved
        rotation = rotations(places, model.head_dim, model.rope_theta, x.dtype)
        return Chunks(step=step, of_token=step.segments(x), rotation=rotation).through(model.blocks, run, x)

    def head(self, model: Any, x: Tensor, home: Home) -> list[Part]:
        return [Part(model.out_proj(model.norm_out(x)), home.seq_lens)]
