"""Encoders: text is looked at as a whole."""

from tests.zoo.base import IDS, VOCABULARY, Architecture, bert_like, stock
from tests.zoo.batches import classified, long_text, some_global_text, text

DISTILBERT = {
    "vocab_size": VOCABULARY,
    "dim": 36,
    "hidden_dim": 50,
    "n_layers": 3,
    "n_heads": 3,
    "max_position_embeddings": 24,
    **IDS,
}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3}
MODERNBERT = {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2, "attention_dropout": 0.1}
FUNNEL = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 2],
    "num_decoder_layers": 1,
    "d_model": 36,
    "n_head": 3,
    "d_head": 10,
    "d_inner": 50,
}
BIG_BIRD = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "max_position_embeddings": 32}

ENCODERS = [
    Architecture("bert", "encoder", bert_like("Bert"), text),
    Architecture("roberta", "encoder", bert_like("Roberta", "ForSequenceClassification"), classified),
    Architecture("xlm_roberta", "encoder", bert_like("XLMRoberta"), text),
    Architecture("distilbert", "encoder", stock("DistilBert", "ForMaskedLM", **DISTILBERT), text),
    Architecture("albert", "encoder", bert_like("Albert", embedding_size=20), text),
    Architecture("electra", "encoder", bert_like("Electra", embedding_size=20), text),
    Architecture("deberta_v2", "encoder", bert_like("DebertaV2", **DEBERTA), text),
    Architecture("mpnet", "encoder", bert_like("MPNet"), text),
    Architecture("modernbert", "encoder", bert_like("ModernBert", **MODERNBERT), text),
    Architecture("roformer", "encoder", bert_like("RoFormer", embedding_size=20), text),
    Architecture("convbert", "encoder", bert_like("ConvBert", embedding_size=20, num_attention_heads=4), text),
    Architecture("funnel", "encoder", stock("Funnel", "ForMaskedLM", **FUNNEL), text),
    Architecture("longformer", "encoder", bert_like("Longformer", attention_window=4), some_global_text),
    Architecture("big_bird", "encoder", bert_like("BigBird", **BIG_BIRD), long_text),
]
