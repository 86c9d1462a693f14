"""Published configurations of models, by name: the parts that lengths, cost and memory depend on.

Not imported from knapformer.adapters, which needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from knapformer import TrainedModel


@dataclass(frozen=True)
class Preset:
    """A model, and how the size of a picture or video becomes tokens.

    name: the same in all commands. num_parameters: of all blocks and the little around them. patch: frames, height and
    width (in pixels) of one token, through autoencoder and patch embedding: (frames, height, width). A causal video
    autoencoder codes the first frame alone: tokens cover 1 + (frames - 1) / patch[0] frames, rounded up.
    text_beside: captions enter by cross-attention and are not part of the sequence. transformer: the class of diffusers
    that `balance` takes, '' where it takes none.
    """

    name: str
    d_model: int
    num_blocks: int
    num_heads: int
    num_parameters: float
    patch: tuple[int, int, int]
    text_beside: bool = False
    transformer: str = ""

    @property
    def is_video(self) -> bool:
        return self.patch[0] > 1

    def num_tokens(self, width: int, height: int, frames: int, text_tokens: int) -> int:
        """Tokens of a sample; width and height in pixels, rounded down to whole tokens as croppers do."""
        of_frames, of_height, of_width = self.patch
        visual = -(-(frames - 1) // of_frames) + 1
        visual *= (height // of_height) * (width // of_width)
        return visual + (0 if self.text_beside else text_tokens)

    def trained_model(self) -> TrainedModel:
        return TrainedModel(
            num_blocks=self.num_blocks, num_parameters=self.num_parameters, num_heads=self.num_heads,
            cuts_queries=True, routed=False,
        )  # fmt: skip


# From the configurations published with the weights; numbers of parameters as their authors state them.
PRESETS = {
    preset.name: preset
    for preset in (
        Preset("flux", 3072, 57, 24, 12e9, (1, 16, 16), transformer="FluxTransformer2DModel"),
        Preset("flux2", 6144, 56, 48, 32e9, (1, 16, 16), transformer="Flux2Transformer2DModel"),
        Preset("qwen-image", 3072, 60, 24, 20e9, (1, 16, 16), transformer="QwenImageTransformer2DModel"),
        Preset("sd3", 1536, 24, 24, 2e9, (1, 16, 16), transformer="SD3Transformer2DModel"),
        Preset("sd3.5-large", 2432, 38, 38, 8.1e9, (1, 16, 16), transformer="SD3Transformer2DModel"),
        Preset("hunyuan-video", 3072, 60, 24, 13e9, (4, 16, 16), transformer="HunyuanVideoTransformer3DModel"),
        Preset("wan-14b", 5120, 40, 40, 14e9, (4, 16, 16), text_beside=True, transformer="WanTransformer3DModel"),
        Preset("wan-1.3b", 1536, 30, 12, 1.3e9, (4, 16, 16), text_beside=True, transformer="WanTransformer3DModel"),
        Preset("wan2.2-5b", 3072, 30, 24, 5e9, (4, 32, 32), text_beside=True, transformer="WanTransformer3DModel"),
        Preset("ltx-video", 2048, 28, 32, 1.9e9, (8, 32, 32), text_beside=True),
    )
}

DEFAULT_PRESET = "flux"
