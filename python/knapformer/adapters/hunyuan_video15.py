"""HunyuanVideo 1.5: diffusers' HunyuanVideo15Transformer3DModel. Masked text is left out, and so is a picture of zeros,
by which the model knows text-to-video. Texts are refined where the sample is."""

from __future__ import annotations

from typing import Any

import torch

from knapformer.adapters.adapter import Home
from knapformer.adapters.hunyuan_video import Hunyuan, text_mask
from knapformer.adapters.joint import JointAdapter, adaptive_double_block
from knapformer.adapters.samples import Samples, on_host, one_after_another


class HunyuanVideo15(Hunyuan):
    sequence = "video patches, and tokens of texts and picture that no mask hides"
    required = (
        "hidden_states", "timestep", "encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2",
        "encoder_attention_mask_2", "image_embeds",
    )  # fmt: skip
    optional = ("timestep_r",)
    blocks = {"transformer_blocks": adaptive_double_block}
    forwards = (
        "HunyuanVideo15TransformerBlock", "HunyuanVideo15IndividualTokenRefinerBlock", "HunyuanVideo15TokenRefiner",
        "HunyuanVideo15PatchEmbed", *JointAdapter.forwards,
    )  # fmt: skip
    processors = ("HunyuanVideo15AttnProcessor2_0", "AttnProcessor2_0")
    small = {
        "in_channels": 3, "out_channels": 2, "num_attention_heads": 3, "attention_head_dim": 14, "num_layers": 2,
        "num_refiner_layers": 2, "mlp_ratio": 2.0, "patch_size": 2, "text_embed_dim": 10, "text_embed_2_dim": 9,
        "image_embed_dim": 11, "rope_axes_dim": (2, 4, 8),
    }  # fmt: skip
    conditions = Hunyuan.conditions | {
        "timestep_r": lambda config, size, draw: 1000 * draw.time() if config.use_meanflow else None,
        "encoder_hidden_states_2": lambda config, size, draw: draw.normal(1, size.text_tokens, 9),
        # The second text may be nothing but padding; and half of the samples have a picture.
        "encoder_attention_mask_2": lambda config, size, draw: text_mask(size) * (size.grid[2] > 2),
        "image_embeds": lambda config, size, draw: draw.normal(1, 5, 11) * (size.grid[2] == 3),
    }

    def embed(self, model: Any, samples: Samples) -> Home:
        config = model.config
        times = samples.one_each("timestep")
        cond = model.time_embed(
            times, samples.one_each("timestep_r") if samples.expect("timestep_r", config.use_meanflow) else None
        )
        text, text_lens = self.refined_text(model, samples, times, leading=False)
        second, lens = samples.rows("encoder_hidden_states_2", config.text_embed_2_dim)
        second_lens, second = samples.unmasked("encoder_attention_mask_2", lens, second)
        image, image_lens = samples.rows("image_embeds", config.image_embed_dim)
        parts = image.split(image_lens)
        given = [bool(flag) for flag in on_host([part.any().reshape(1) for part in parts])]
        image = torch.cat([image[:0], *(part for part, flag in zip(parts, given, strict=True) if flag)])
        image_lens = [length * flag for length, flag in zip(image_lens, given, strict=True)]
        of_kind = model.cond_type_embed(torch.arange(3, device=text.device))
        context, context_lens = one_after_another(
            (text + of_kind[0], text_lens),
            (model.context_embedder_2(second) + of_kind[1], second_lens),
            (model.image_embedder(image) + of_kind[2], image_lens),
        )
        return self.home_of_videos(model, samples, context, context_lens, cond)
