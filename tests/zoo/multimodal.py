"""Multimodal: images and text together."""

from typing import Any

from tests.zoo.base import IDS, VOCABULARY, Architecture, Batches, bert_like, stock
from tests.zoo.batches import answers, captioned, captions, image_in_text, patches_in_text, tiles_in_text

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
    **IDS,
}
VISION = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}
PROJECTED = {**VISION, "projection_dim": 22}
WITH_IMAGE = {**TEXT, "vocab_size": VOCABULARY + 1, "num_key_value_heads": 3}
"""One token more, which stands for a piece of an image."""
FOUR_PATCHES = {**VISION, "image_size": 8}

CLIP = {"text_config": TEXT, "vision_config": PROJECTED, "projection_dim": 22}
ALTCLIP = {"text_config": {**TEXT, "project_dim": 22}, "vision_config": PROJECTED, "projection_dim": 22}
SIGLIP = {"text_config": {**TEXT, "projection_size": 30}, "vision_config": VISION}
BLIP = {
    "text_config": {**TEXT, "encoder_hidden_size": 30, "hidden_dropout_prob": 0.1, "sep_token_id": 2},
    "vision_config": {**VISION, "initializer_range": 0.02},
    "projection_dim": 22,
}
GIT = {"vision_config": VISION, "num_hidden_layers": 2}
VILT = {"image_size": 12, "patch_size": 4, "hidden_dropout_prob": 0.1, "num_labels": 3, "num_hidden_layers": 2}
LLAVA = {
    "text_config": {"model_type": "llama", **WITH_IMAGE},
    "vision_config": {"model_type": "clip_vision_model", **FOUR_PATCHES},
    "image_token_index": VOCABULARY,
    "image_seq_length": 4,
}
PALIGEMMA = {
    "text_config": {"model_type": "gemma", "head_dim": 12, **WITH_IMAGE},
    "vision_config": {"model_type": "siglip_vision_model", **FOUR_PATCHES, "projection_dim": 36},
    "image_token_index": VOCABULARY,
    "projection_dim": 36,
    "hidden_size": 36,
}
IDEFICS3 = {
    "text_config": {"model_type": "llama", **WITH_IMAGE},
    "vision_config": {**VISION, "image_size": 16},
    "image_token_id": VOCABULARY,
    "scale_factor": 2,
}
QWEN2_VL = {
    "text_config": {
        **TEXT,
        "vocab_size": VOCABULARY + 4,
        "num_key_value_heads": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    },
    "vision_config": {"depth": 2, "embed_dim": 24, "hidden_size": 36, "num_heads": 3, "patch_size": 4, "mlp_ratio": 2},
    "image_token_id": VOCABULARY,
    "video_token_id": VOCABULARY + 1,
    "vision_start_token_id": VOCABULARY + 2,
    "vision_end_token_id": VOCABULARY + 3,
}
BRIDGETOWER = {
    "text_config": {**TEXT, "hidden_size": 64, "num_attention_heads": 4},
    "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 4, "image_size": 12},
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
"""Its vision tower gives each head 64 channels."""


def matched(name: str, stem: str, **settings: Any) -> Architecture:
    """Scores how well texts and images match; `stem` is what the names of its classes begin with."""
    return Architecture(name, "multimodal", stock(stem, "Model", **settings), captions)


def speaking(name: str, stem: str, batch: Batches, **settings: Any) -> Architecture:
    """Writes text about images."""
    builder = stock(stem, "ForConditionalGeneration", **settings)
    return Architecture(name, "multimodal", builder, batch, generates=True)


MULTIMODAL = [
    matched("clip", "CLIP", **CLIP),
    matched("altclip", "AltCLIP", **ALTCLIP),
    matched("chinese_clip", "ChineseCLIP", **CLIP),
    matched("siglip", "Siglip", **SIGLIP),
    Architecture("vilt", "multimodal", bert_like("Vilt", "ForQuestionAnswering", **VILT), answers),
    Architecture("bridgetower", "multimodal", stock("BridgeTower", "ForMaskedLM", **BRIDGETOWER), captioned),
    Architecture("git", "multimodal", bert_like("Git", "ForCausalLM", **GIT), captioned, generates=True),
    speaking("blip", "Blip", captioned, **BLIP),
    speaking("llava", "Llava", image_in_text, **LLAVA),
    speaking("paligemma", "PaliGemma", image_in_text, **PALIGEMMA),
    speaking("idefics3", "Idefics3", tiles_in_text, **IDEFICS3),
    speaking("qwen2_vl", "Qwen2VL", patches_in_text, **QWEN2_VL),
]
