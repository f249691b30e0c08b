"""Vision: images are classified, by attention and by convolution."""

from typing import Any

from tests.zoo.base import Architecture, Builder, stock
from tests.zoo.batches import pixels

VIT = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
BEIT = {"use_relative_position_bias": True, "drop_path_rate": 0.1}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "depths": [2, 2],
    "num_heads": [2, 3],
    "window_size": 4,
}
CONVNEXT = {"hidden_sizes": [10, 14, 18, 22], "depths": [1, 2, 2, 1], "drop_path_rate": 0.2}
RESNET = {"embedding_size": 10, "hidden_sizes": [12, 20], "depths": [2, 1]}
MOBILEVIT = {
    "image_size": 32,
    "patch_size": 2,
    "hidden_sizes": [20, 24, 28],
    "neck_hidden_sizes": [6, 8, 10, 12, 14, 16, 18],
    "num_attention_heads": 4,
}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [2, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [12, 18],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 3],
    "mlp_ratios": [3, 2],
}
POOLFORMER = {
    "depths": [1, 2, 1, 1],
    "hidden_sizes": [10, 14, 18, 22],
    "drop_path_rate": 0.2,
}
PVT = {
    "image_size": 32,
    "depths": [1, 2, 1, 1],
    "hidden_sizes": [10, 12, 18, 20],
    "num_attention_heads": [1, 2, 3, 4],
    "sequence_reduction_ratios": [4, 2, 1, 1],
    "mlp_ratios": [3, 2, 2, 2],
}
LEVIT = {
    "image_size": 32,
    "hidden_sizes": [16, 24, 32],
    "num_attention_heads": [2, 3, 4],
    "depths": [2, 1, 1],
    "key_dim": [6, 6, 6],
    "down_ops": [["Subsample", 6, 2, 4, 2, 2], ["Subsample", 6, 4, 4, 2, 2]],
}
FOCALNET = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 12,
    "hidden_sizes": [14, 18],
    "depths": [2, 1],
    "focal_levels": [2, 1],
    "focal_windows": [3, 3],
    "use_layerscale": True,
}


def classifier(name: str, stem: str, size: int, **settings: Any) -> Architecture:
    """`stem`: what the names of its classes begin with. Images are `size` pixels high and wide."""
    return Architecture(name, "vision", built(stem, **settings), pixels(size))


def built(stem: str, **settings: Any) -> Builder:
    return stock(stem, "ForImageClassification", num_labels=3, **settings)


VISION = [
    classifier("vit", "ViT", 12, **VIT),
    classifier("beit", "Beit", 12, **VIT, **BEIT),
    classifier("deit", "DeiT", 12, **VIT),
    classifier("dinov2", "Dinov2", 12, **VIT, use_swiglu_ffn=True, drop_path_rate=0.2),
    classifier("swin", "Swin", 16, **SWIN),
    classifier("swinv2", "Swinv2", 16, **SWIN),
    classifier("focalnet", "FocalNet", 16, **FOCALNET),
    classifier("convnext", "ConvNext", 32, **CONVNEXT),
    classifier("convnextv2", "ConvNextV2", 32, **CONVNEXT),
    classifier("resnet", "ResNet", 16, **RESNET),
    classifier("regnet", "RegNet", 16, **RESNET, groups_width=4),
    classifier("mobilevit", "MobileViT", 32, **MOBILEVIT),
    classifier("segformer", "Segformer", 16, **SEGFORMER),
    classifier("poolformer", "PoolFormer", 32, **POOLFORMER),
    classifier("pvt", "Pvt", 32, **PVT),
    classifier("levit", "Levit", 32, **LEVIT),
]
