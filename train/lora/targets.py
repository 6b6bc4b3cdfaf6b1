"""The groups of modules that LoRA can be applied to, and the names of these modules in the model."""

LAYER = r"layers\.\d+\."
BLOCK = r"vision\.blocks\.\d+\."

# Name in `lora.targets` -> regular expression for the names of the modules that get factors.
LORA_TARGETS = {
    "attention": LAYER + r"attn\.(wq_a|wq_b|wkv|wo_a|wo_b)",
    "compressor": LAYER + r"attn\.compressor\.(wkv|wgate)",
    "indexer": LAYER + r"attn\.indexer\.(wq_b|weights_proj|wk)",
    "shared_experts": LAYER + r"ffn\.shared_experts\.w[123]",
    "experts": LAYER + r"ffn\.experts",
    "engram": LAYER + r"engram\.wkv",
    "embed": "embed",
    "head": "head",
    "vision": BLOCK + r"(attn\.(wqkv|wo)|mlp\.w[12])",
    "aligner": r"aligner\.w[12]",
}
