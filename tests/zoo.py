"""Small stock models of Transformers, randomly initialised: what people train, in miniature and in awkward sizes.

Each is trained through `model(**batch).loss`. Dropout stays as each architecture has it by default, so that a loop is
only right if its random numbers are right too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import transformers as hf
from torch import Generator, Tensor, nn

Batch = dict[str, Any]

VOCABULARY = 37
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Architecture:
    name: str
    family: str
    builder: Callable[[], nn.Module]
    batch: Callable[[Generator], Batch]

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.builder().train()

    def batches(self, seed: int = 7) -> Iterator[Batch]:
        """An endless stream; also starts NumPy's random numbers anew, which the speech models mask with."""
        numpy.random.seed(seed)
        generator = Generator().manual_seed(seed)
        while True:
            yield self.batch(generator)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


# --- batches


def _tokens(generator: Generator, *shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def _text(generator: Generator) -> Batch:
    """Tokens that predict themselves; the second row is padded."""
    tokens = _tokens(generator, 2, 9)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _pairs(generator: Generator) -> Batch:
    return {"input_ids": _tokens(generator, 2, 9), "labels": _tokens(generator, 2, 5)}


def _classes(generator: Generator) -> Batch:
    return {"input_ids": _tokens(generator, 3, 7), "labels": torch.randint(0, 2, (3,), generator=generator)}


def _pixels(size: int) -> Callable[[Generator], Batch]:
    def batch(generator: Generator) -> Batch:
        pixels = torch.randn(2, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (2,), generator=generator)}

    return batch


def _speech(generator: Generator) -> Batch:
    return {"input_values": torch.randn(2, 400, generator=generator), "labels": _tokens(generator, 2, 3)}


def _mel(generator: Generator) -> Batch:
    return {"input_features": torch.randn(2, 10, 20, generator=generator), "labels": _tokens(generator, 2, 5)}


def _captions(generator: Generator) -> Batch:
    text = _tokens(generator, 3, 6)
    text[:, -1] = IDS["eos_token_id"]
    return {"input_ids": text, "pixel_values": torch.randn(3, 3, 12, 12, generator=generator), "return_loss": True}


def _image_in_text(generator: Generator) -> Batch:
    """One image of four patches, then text."""
    text = _tokens(generator, 2, 9)
    text[:, 1:5] = VOCABULARY
    labels = text.masked_fill(text == VOCABULARY, -100)
    return {"input_ids": text, "pixel_values": torch.randn(2, 3, 8, 8, generator=generator), "labels": labels}


# --- models


def _llama_like(config: type, model: type, **more: Any) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 40,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return lambda: model(config(**{**sizes, **IDS, **more}))


def _bert_like(config: type, model: type, **more: Any) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 24,
    }
    return lambda: model(config(**{**sizes, **IDS, **more}))


def _gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=36, n_layer=3, n_head=3, **IDS)
    )


def _gpt_neox() -> nn.Module:
    return _bert_like(hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, hidden_size=48, tie_word_embeddings=False)()


def _opt() -> nn.Module:
    sizes = {"hidden_size": 36, "ffn_dim": 50, "num_hidden_layers": 3, "num_attention_heads": 3}
    more = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, "word_embed_proj_dim": 20}
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, **more, do_layer_norm_before=False, **IDS))


def _bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=36, n_layer=3, n_head=3, **IDS))


def _falcon() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3}
    return hf.FalconForCausalLM(hf.FalconConfig(**sizes, **IDS))


def _gemma2() -> nn.Module:
    return _llama_like(hf.Gemma2Config, hf.Gemma2ForCausalLM, head_dim=10, sliding_window=4)()


def _mamba() -> nn.Module:
    sizes = {"hidden_size": 36, "state_size": 5, "num_hidden_layers": 3, "conv_kernel": 3}
    return hf.MambaForCausalLM(hf.MambaConfig(vocab_size=VOCABULARY, **sizes, **IDS))


def _distilbert() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "dim": 36, "hidden_dim": 50, "n_layers": 3, "n_heads": 3}
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**sizes, max_position_embeddings=24, **IDS))


def _t5() -> nn.Module:
    sizes = {"d_model": 36, "d_kv": 10, "d_ff": 50, "num_layers": 2, "num_heads": 3}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCABULARY, **sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    )


def _bart_like(config: type, model: type) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 36,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 50,
        "decoder_ffn_dim": 44,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "max_position_embeddings": 24,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": 2,
    }
    return lambda: model(config(**sizes, **IDS))


def _vit_like(config: type, model: type, **more: Any) -> Callable[[], nn.Module]:
    sizes = {
        "image_size": 12,
        "patch_size": 4,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "num_labels": 3,
    }
    return lambda: model(config(**{**sizes, **more}))


def _swin() -> nn.Module:
    sizes = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 12,
        "depths": [2, 2],
        "num_heads": [2, 3],
        "window_size": 4,
    }
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes, num_labels=3))


def _convnext() -> nn.Module:
    sizes = {"hidden_sizes": [10, 14, 18, 22], "depths": [1, 2, 2, 1], "drop_path_rate": 0.2}
    return hf.ConvNextForImageClassification(hf.ConvNextConfig(**sizes, num_labels=3))


def _speech_like(config: type, model: type) -> Callable[[], nn.Module]:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "conv_dim": (12, 14, 16),
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 2),
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_length": 2,
        "ctc_loss_reduction": "mean",
    }
    return lambda: model(config(**sizes, **IDS))


def _whisper() -> nn.Module:
    sizes = {
        "vocab_size": VOCABULARY,
        "num_mel_bins": 10,
        "d_model": 36,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 50,
        "decoder_ffn_dim": 44,
        "encoder_attention_heads": 3,
        "decoder_attention_heads": 3,
        "max_source_positions": 10,
        "max_target_positions": 12,
        "decoder_start_token_id": 1,
    }
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, dropout=0.1, **IDS))


TEXT_TOWER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
}
VISION_TOWER = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 30,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
}


def _clip() -> nn.Module:
    text, vision = {**TEXT_TOWER, **IDS}, {**VISION_TOWER, "projection_dim": 22}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=22))


def _llava() -> nn.Module:
    vision = hf.CLIPVisionConfig(**{**VISION_TOWER, "image_size": 8})
    text = hf.LlamaConfig(**{**TEXT_TOWER, "vocab_size": VOCABULARY + 1}, **IDS)
    config = hf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=VOCABULARY, image_seq_length=4)
    return hf.LlavaForConditionalGeneration(config)


MOE = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}

ALL = [
    Architecture("gpt2", "decoder", _gpt2, _text),
    Architecture("llama", "decoder", _llama_like(hf.LlamaConfig, hf.LlamaForCausalLM), _text),
    Architecture("mistral", "decoder", _llama_like(hf.MistralConfig, hf.MistralForCausalLM, sliding_window=4), _text),
    Architecture("qwen2", "decoder", _llama_like(hf.Qwen2Config, hf.Qwen2ForCausalLM, tie_word_embeddings=True), _text),
    Architecture("qwen3", "decoder", _llama_like(hf.Qwen3Config, hf.Qwen3ForCausalLM, head_dim=10), _text),
    Architecture("gemma2", "decoder", _gemma2, _text),
    Architecture("gpt_neox", "decoder", _gpt_neox, _text),
    Architecture("opt", "decoder", _opt, _text),
    Architecture("bloom", "decoder", _bloom, _text),
    Architecture("falcon", "decoder", _falcon, _text),
    Architecture("phi", "decoder", _llama_like(hf.PhiConfig, hf.PhiForCausalLM, hidden_size=32), _text),
    Architecture("bert", "encoder", _bert_like(hf.BertConfig, hf.BertForMaskedLM), _text),
    Architecture("roberta", "encoder", _bert_like(hf.RobertaConfig, hf.RobertaForSequenceClassification), _classes),
    Architecture("distilbert", "encoder", _distilbert, _text),
    Architecture("albert", "encoder", _bert_like(hf.AlbertConfig, hf.AlbertForMaskedLM, embedding_size=20), _text),
    Architecture("electra", "encoder", _bert_like(hf.ElectraConfig, hf.ElectraForMaskedLM, embedding_size=20), _text),
    Architecture(
        "deberta_v2",
        "encoder",
        _bert_like(
            hf.DebertaV2Config,
            hf.DebertaV2ForMaskedLM,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            conv_kernel_size=3,
        ),
        _text,
    ),
    Architecture("t5", "encoder-decoder", _t5, _pairs),
    Architecture("bart", "encoder-decoder", _bart_like(hf.BartConfig, hf.BartForConditionalGeneration), _pairs),
    Architecture("marian", "encoder-decoder", _bart_like(hf.MarianConfig, hf.MarianMTModel), _pairs),
    Architecture(
        "pegasus", "encoder-decoder", _bart_like(hf.PegasusConfig, hf.PegasusForConditionalGeneration), _pairs
    ),
    Architecture("vit", "vision", _vit_like(hf.ViTConfig, hf.ViTForImageClassification), _pixels(12)),
    Architecture(
        "beit",
        "vision",
        _vit_like(hf.BeitConfig, hf.BeitForImageClassification, use_relative_position_bias=True, drop_path_rate=0.1),
        _pixels(12),
    ),
    Architecture("deit", "vision", _vit_like(hf.DeiTConfig, hf.DeiTForImageClassification), _pixels(12)),
    Architecture("swin", "vision", _swin, _pixels(16)),
    Architecture("convnext", "vision", _convnext, _pixels(32)),
    Architecture("wav2vec2", "audio", _speech_like(hf.Wav2Vec2Config, hf.Wav2Vec2ForCTC), _speech),
    Architecture("hubert", "audio", _speech_like(hf.HubertConfig, hf.HubertForCTC), _speech),
    Architecture("whisper", "audio", _whisper, _mel),
    Architecture(
        "mixtral", "moe", _llama_like(hf.MixtralConfig, hf.MixtralForCausalLM, num_local_experts=4, **MOE), _text
    ),
    Architecture(
        "qwen2_moe",
        "moe",
        _llama_like(
            hf.Qwen2MoeConfig,
            hf.Qwen2MoeForCausalLM,
            num_experts=4,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=24,
            **MOE,
        ),
        _text,
    ),
    Architecture("mamba", "state-space", _mamba, _text),
    Architecture("clip", "multimodal", _clip, _captions),
    Architecture("llava", "multimodal", _llava, _image_in_text),
]

ZOO = {architecture.name: architecture for architecture in ALL}
