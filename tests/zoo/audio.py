"""Audio: from waves and spectrograms to text and classes."""

from typing import Any

from tests.zoo.base import IDS, VOCABULARY, Architecture, Builder, stock
from tests.zoo.batches import features, mel, sounds, speech, wave

SPEECH = {
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
    **IDS,
}
TRANSCRIBER = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 50,
    "decoder_ffn_dim": 44,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "max_target_positions": 12,
    "decoder_start_token_id": 1,
    "dropout": 0.1,
    **IDS,
}
WHISPER = {"num_mel_bins": 10, "max_source_positions": 10}
SPEECH_TO_TEXT = {
    "input_feat_per_channel": 10,
    "conv_channels": 14,
    "conv_kernel_sizes": (3, 3),
    "max_source_positions": 20,
    "encoder_layerdrop": 0.2,
}
MOONSHINE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 3,
    "decoder_num_attention_heads": 3,
    "max_position_embeddings": 24,
    "decoder_start_token_id": 1,
    "attention_dropout": 0.1,
    **IDS,
}
SPECTROGRAM = {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 4,
    "frequency_stride": 3,
    "time_stride": 4,
    "max_length": 20,
    "num_mel_bins": 10,
    "hidden_dropout_prob": 0.1,
    "num_labels": 3,
}


def spelled(name: str, stem: str, **more: Any) -> Architecture:
    """Waves to letters; `stem` is what the names of its classes begin with."""
    return Architecture(name, "audio", stock(stem, "ForCTC", **{**SPEECH, **more}), speech)


def transcriber(stem: str, **settings: Any) -> Builder:
    return stock(stem, "ForConditionalGeneration", **settings)


AUDIO = [
    spelled("wav2vec2", "Wav2Vec2"),
    spelled("wav2vec2_conformer", "Wav2Vec2Conformer", conv_depthwise_kernel_size=5),
    spelled("hubert", "Hubert"),
    spelled("wavlm", "WavLM", num_buckets=8, max_bucket_distance=16),
    spelled("unispeech", "UniSpeech"),
    spelled("sew", "SEW"),
    spelled("data2vec_audio", "Data2VecAudio", conv_pos_kernel_size=5, num_conv_pos_embeddings=2),
    Architecture("whisper", "audio", transcriber("Whisper", **TRANSCRIBER, **WHISPER), mel, generates=True),
    Architecture(
        "speech_to_text", "audio", transcriber("Speech2Text", **TRANSCRIBER, **SPEECH_TO_TEXT), features, generates=True
    ),
    Architecture("moonshine", "audio", transcriber("Moonshine", **MOONSHINE), wave, generates=True),
    Architecture("ast", "audio", stock("AST", "ForAudioClassification", **SPECTROGRAM), sounds),
]
