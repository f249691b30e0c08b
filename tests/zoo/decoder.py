"""Decoders: text predicts its next token."""

from tests.zoo.base import IDS, VOCABULARY, Architecture, Builder, bert_like, llama_like, stock
from tests.zoo.batches import text

GPT = {"vocab_size": VOCABULARY, "n_positions": 24, "n_embd": 36, "n_layer": 3, "n_head": 3, **IDS}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 36, "n_layer": 3, "n_head": 3, **IDS}
FALCON = {"vocab_size": VOCABULARY, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, **IDS}
MPT = {"vocab_size": VOCABULARY, "d_model": 36, "n_layers": 3, "n_heads": 3, "max_seq_len": 24, **IDS}
GPT_NEO = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_layers": 3,
    "num_heads": 3,
    "attention_types": [[["global", "local", "global"], 1]],
    "window_size": 4,
    "max_position_embeddings": 24,
    **IDS,
}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 36,
    "ffn_dim": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "max_position_embeddings": 24,
    "word_embed_proj_dim": 20,
    "do_layer_norm_before": False,
    **IDS,
}
XGLM = {
    "vocab_size": VOCABULARY,
    "d_model": 36,
    "ffn_dim": 50,
    "num_layers": 3,
    "attention_heads": 3,
    "max_position_embeddings": 24,
    "layerdrop": 0.2,
    **IDS,
}
GEMMA3 = {
    "config": "Gemma3TextConfig",
    "head_dim": 10,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2.0}


def decoder(name: str, builder: Builder) -> Architecture:
    return Architecture(name, "decoder", builder, text, generates=True)


DECODERS = [
    decoder("gpt2", stock("GPT2", "LMHeadModel", **GPT)),
    decoder("gpt_neo", stock("GPTNeo", "ForCausalLM", **GPT_NEO)),
    decoder("gptj", stock("GPTJ", "ForCausalLM", **GPT, rotary_dim=4)),
    decoder("codegen", stock("CodeGen", "ForCausalLM", **{**GPT, "n_embd": 40, "n_head": 4}, rotary_dim=4)),
    decoder("gpt_neox", bert_like("GPTNeoX", "ForCausalLM", hidden_size=48, tie_word_embeddings=False)),
    decoder("opt", stock("OPT", "ForCausalLM", **OPT)),
    decoder("xglm", stock("XGLM", "ForCausalLM", **XGLM)),
    decoder("bloom", stock("Bloom", "ForCausalLM", **BLOOM)),
    decoder("mpt", stock("Mpt", "ForCausalLM", **MPT)),
    decoder("falcon", stock("Falcon", "ForCausalLM", **FALCON)),
    decoder("llama", llama_like("Llama")),
    decoder("mistral", llama_like("Mistral", sliding_window=4)),
    decoder("qwen2", llama_like("Qwen2", tie_word_embeddings=True)),
    decoder("qwen3", llama_like("Qwen3", head_dim=10)),
    decoder("gemma", llama_like("Gemma", head_dim=10)),
    decoder("gemma2", llama_like("Gemma2", head_dim=10, sliding_window=4)),
    decoder("gemma3", llama_like("Gemma3", **GEMMA3)),
    decoder("phi", llama_like("Phi", hidden_size=32)),
    decoder("phi3", llama_like("Phi3", resid_pdrop=0.1)),
    decoder("stablelm", llama_like("StableLm", use_parallel_residual=True, qk_layernorm=True)),
    decoder("olmo2", llama_like("Olmo2")),
    decoder("starcoder2", llama_like("Starcoder2", sliding_window=4, residual_dropout=0.1)),
    decoder("cohere", llama_like("Cohere", use_qk_norm=True)),
    decoder("granite", llama_like("Granite", **GRANITE)),
    decoder("glm", llama_like("Glm", head_dim=12)),
    decoder("smollm3", llama_like("SmolLM3", no_rope_layer_interval=2)),
]
