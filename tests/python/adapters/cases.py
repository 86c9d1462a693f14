"""Small models of diffusers in random configurations, and samples for them: what the adapters are tested with."""

from __future__ import annotations

from typing import Any

from knapformer.adapters.parity import GRADIENTS, SmallModel, gradient_errors, gradients, sample_loss
from torch import Tensor

Sample = dict[str, Any]

FLUX, FLUX2, SD3, WAN = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"
)  # fmt: skip
QWEN = "QwenImageTransformer2DModel"
LTX2 = "LTX2VideoTransformer3DModel"
HUNYUAN, HUNYUAN15 = "HunyuanVideoTransformer3DModel", "HunyuanVideo15Transformer3DModel"
# The table of classes in docs/integration.md: the first diffusers with which check() finds no difference, what is
# planned and moved, and what a packed call refuses.
GUIDE: dict[str, tuple[str, str, str]] = {
    "ChromaTransformer2DModel": (
        "0.37",
        "text tokens that no mask hides, and image tokens",
        "IP adapters, `controlnet_blocks_repeat` (repeat the list), masks of numbers (which diffusers adds to the "
        "scores)",
    ),
    "ChronoEditTransformer3DModel": ("0.37", "video patches; text and picture travel beside", ""),
    "Flux2Transformer2DModel": ("0.37", "text and image tokens", "the cache of reference images"),
    "Flux3Transformer2DModel": ("0.42", "text, image and reference tokens", ""),
    "FluxTransformer2DModel": (
        "0.37",
        "text and image tokens",
        "IP adapters, `controlnet_blocks_repeat` (repeat the list)",
    ),
    "HunyuanVideo15Transformer3DModel": (
        "0.37",
        "video patches, and tokens of texts and picture that no mask hides",
        "",
    ),
    "HunyuanVideoTransformer3DModel": (
        "0.37",
        "video patches, and text tokens that no mask hides",
        "texts with the padding in front",
    ),
    "Krea2Transformer2DModel": (
        "0.39",
        "text tokens that no mask hides, and image tokens",
        "masks of numbers (which diffusers adds to the scores)",
    ),
    "LTX2VideoTransformer3DModel": (
        "0.38",
        "audio and video tokens; their texts travel beside",
        "masks of video tokens, keyframes, guidance by perturbed or isolated modalities",
    ),
    "LongCatImageTransformer2DModel": ("0.37", "text and image tokens", ""),
    "MiniMaxH3Transformer3DModel": ("0.40", "text, video and audio tokens", ""),
    "QwenImage21Transformer2DModel": (
        "0.41",
        "text tokens that no mask hides, and image tokens, those of references too",
        "the cache of keys",
    ),
    "QwenImageTransformer2DModel": (
        "0.37",
        "text tokens that no mask hides, and image tokens, those of references too",
        "",
    ),
    "SD3Transformer2DModel": ("0.37", "text and image tokens", "blocks with two attentions (3.5 medium)"),
    "SkyReelsV2Transformer3DModel": (
        "0.37",
        "video patches; text and picture travel beside",
        "diffusion forcing, frames in causal blocks, embedded frame rates",
    ),
    "WanTransformer3DModel": ("0.37", "video patches; text and picture travel beside", ""),
    "WanVACETransformer3DModel": (
        "0.37",
        "video and control patches; text and picture travel beside",
        "control of another size, `control_hidden_states_scale`",
    ),
    "ZImageTransformer2DModel": (
        "0.37",
        "text and image tokens, each padded to a multiple of 32",
        "several images a sample and SigLIP (omni), ControlNet, several patch sizes",
    ),
    "knapformer.models.transformer.Transformer": ("", "tokens", ""),
}
# Classes with what differs from Adapter.small: configurations that compute other things.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "flux": (FLUX, {}),
    "flux-plain": (FLUX, {
        "num_layers": 1, "num_single_layers": 3, "num_attention_heads": 5, "attention_head_dim": 8,
        "axes_dims_rope": (4, 2, 2), "guidance_embeds": False, "patch_size": 1, "out_channels": 10,
    }),
    "flux-double": (FLUX, {"num_layers": 3, "num_single_layers": 0, "num_attention_heads": 2}),
    "chroma": ("ChromaTransformer2DModel", {}),
    "krea2": ("Krea2Transformer2DModel", {}),
    "z-image": ("ZImageTransformer2DModel", {}),
    "flux3": ("Flux3Transformer2DModel", {}),
    "flux3-map": ("Flux3Transformer2DModel", {"flow_map": True, "num_layers": 1}),
    "hunyuan-video": (HUNYUAN, {}),
    "hunyuan-video-first-frame": (HUNYUAN, {
        "image_condition_type": "token_replace", "guidance_embeds": False, "patch_size": 1, "patch_size_t": 2,
    }),
    "hunyuan-video15": (HUNYUAN15, {}),
    "hunyuan-video15-flow": (HUNYUAN15, {"use_meanflow": True, "patch_size": 1, "patch_size_t": 2}),
    "minimax-h3": ("MiniMaxH3Transformer3DModel", {}),
    "qwen-image21": ("QwenImage21Transformer2DModel", {}),
    "qwen-image21-one-time": ("QwenImage21Transformer2DModel", {"causal_condition": False, "num_layers": 1}),
    "ltx2": (LTX2, {}),
    "ltx2.3": (LTX2, {
        "rope_type": "split", "gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True,
        "audio_cross_attn_mod": True, "use_prompt_embeddings": False, "audio_num_attention_heads": 3,
        "audio_cross_attention_dim": 24, "cross_attn_timestep_scale_multiplier": 1, "num_layers": 1,
    }),
    "ltx2-plain": (LTX2, {
        "cross_attn_mod": True, "audio_cross_attn_mod": True, "use_prompt_adaln_single": False, "num_layers": 1,
    }),
    "longcat-image": ("LongCatImageTransformer2DModel", {}),
    "chrono-edit": ("ChronoEditTransformer3DModel", {"image_dim": 11, "added_kv_proj_dim": 42, "num_layers": 1}),
    "skyreels-v2": ("SkyReelsV2Transformer3DModel", {}),
    "flux2": (FLUX2, {}),
    "flux2-plain": (FLUX2, {"num_layers": 2, "num_single_layers": 1, "num_attention_heads": 2, "rope_theta": 500}),
    "qwen-image": (QWEN, {}),
    "qwen-image-edit": (QWEN, {"zero_cond_t": True}),
    "qwen-image-layered": (QWEN, {"use_additional_t_cond": True, "use_layer3d_rope": True, "num_layers": 1}),
    "sd3": (SD3, {}),
    "sd3-plain": (SD3, {"num_layers": 2, "qk_norm": None, "num_attention_heads": 2, "attention_head_dim": 12}),
    "wan": (WAN, {"cross_attn_norm": False}),
    "wan-two-heads": (WAN, {"num_attention_heads": 2}),
    "wan-image": (WAN, {"image_dim": 11, "added_kv_proj_dim": 42}),
    "wan-image-as-text": (WAN, {"image_dim": 11, "num_layers": 1}),
    "wan-vace": ("WanVACETransformer3DModel", {"image_dim": 11, "added_kv_proj_dim": 42}),
    "wan-two-images": (WAN, {"image_dim": 11, "added_kv_proj_dim": 42, "pos_embed_seq_len": 12, "num_layers": 1}),
}  # fmt: skip

CONTROLLED = ("flux-plain", "qwen-image-layered", "sd3-plain")  # with residuals of a ControlNet


def of(class_name: str, **fields: Any) -> SmallModel:
    import diffusers

    return SmallModel(getattr(diffusers, class_name), **fields)


def cases() -> dict[str, SmallModel]:
    return {name: of(cls, controlled=name in CONTROLLED, **fields) for name, (cls, fields) in CASES.items()}


def packed_gradients(model: Any, samples: list[Sample]) -> dict[str, Tensor]:
    """Of the sum of the samples' losses, in a packed call."""
    sum(sample_loss(p, s) for p, s in zip(model(samples), samples, strict=True)).backward()
    return gradients(model)


def assert_gradients_equal(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = GRADIENTS) -> None:
    assert got.keys() >= expected.keys()
    errors = gradient_errors(got, expected)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]}"
