"""Encoder-decoders: one text is made from another."""

from typing import Any

from tests.zoo.base import IDS, VOCABULARY, Architecture, Batches, Builder, stock
from tests.zoo.batches import pairs, pairs_of_equal_length, some_global_pairs

T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "d_kv": 10,
    "d_ff": 50,
    "num_layers": 2,
    "num_heads": 3,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
BART = {
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
    **IDS,
}
LED = {"attention_window": 4, "max_encoder_position_embeddings": 24, "max_decoder_position_embeddings": 24}
LONGT5 = {"encoder_attention_type": "transient-global", "local_radius": 2, "global_block_size": 4}
FSMT = {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
PROPHETNET = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "encoder_ffn_dim": 50,
    "num_encoder_layers": 2,
    "num_encoder_attention_heads": 3,
    "decoder_ffn_dim": 44,
    "num_decoder_layers": 2,
    "num_decoder_attention_heads": 3,
    "max_position_embeddings": 24,
    "num_buckets": 6,
    "relative_max_distance": 10,
    "decoder_start_token_id": 0,
    **IDS,
}


def t5_like(name: str, **more: Any) -> Builder:
    return stock(name, "ForConditionalGeneration", **{**T5, **more})


def bart_like(name: str, task: str = "ForConditionalGeneration", **more: Any) -> Builder:
    return stock(name, task, **{**BART, **more})


def translator(name: str, builder: Builder, batch: Batches = pairs) -> Architecture:
    return Architecture(name, "encoder-decoder", builder, batch, generates=True)


ENCODER_DECODERS = [
    translator("t5", t5_like("T5")),
    translator("mt5", t5_like("MT5", tie_word_embeddings=False)),
    translator("umt5", t5_like("UMT5")),
    translator("longt5", t5_like("LongT5", **LONGT5)),
    translator("bart", bart_like("Bart")),
    translator("mbart", bart_like("MBart", decoder_layerdrop=0.2)),
    translator("plbart", bart_like("PLBart")),
    translator("marian", bart_like("Marian", "MTModel")),
    translator("pegasus", bart_like("Pegasus")),
    translator("blenderbot", bart_like("Blenderbot")),
    translator("m2m_100", bart_like("M2M100")),
    translator("led", bart_like("LED", **LED), some_global_pairs),
    translator("fsmt", bart_like("FSMT", **FSMT), pairs_of_equal_length),
    translator("prophetnet", stock("ProphetNet", "ForConditionalGeneration", **PROPHETNET)),
]
