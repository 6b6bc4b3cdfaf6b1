"""What vLLM loads for this architecture: names, types and shapes of packed weights, of the drafter and of adapters.

Facts read from vLLM's public source of September 2026 (packages `vllm/models/deepseek_v41` and `vllm/lora`; 0.30 is the
first version with this architecture): the mapper of names, the loaders of the backbone and of the drafter, and the
parameters that they fill. Nothing of vLLM is run. SGLang's main branch of that month reads the same released folder
(`srt/configs/deepseek_v41.py` maps it to its model of V4); whether it takes adapters for it was not found.
"""

from __future__ import annotations

import re

from model.config import ModelConfig

# A released name (N and E are numbers), the type in the file, and the shape. FP8 weights have a scale for 32 x 32
# values, FP4 weights one for 32 values of a row; their codes hold two values a byte.
BF16, FP32, ANY = ("BF16",), ("F32",), ("BF16", "F32")
ATTENTION = {
    "wq_a": "Q,H",
    "wq_b": "A,Q",
    "wkv": "D,H",
    "wo_a": "GO,A/G",
    "wo_b": "H,GO",
}
BLOCK = {
    "hc_(attn|ffn)_fn": (FP32, "M,nH"),
    "hc_(attn|ffn)_base": (FP32, "M"),
    "hc_(attn|ffn)_scale": (FP32, "3"),
    "(attn|ffn)_norm.weight": (ANY, "H"),
    "attn.attn_sink": (FP32, "heads"),
    "attn.q_norm.weight": (ANY, "Q"),
    "attn.kv_norm.weight": (ANY, "D"),
    "ffn.gate.weight": (ANY, "experts,H"),
    "ffn.gate.(bias|bias_vl)": (FP32, "experts"),
}
FP8 = {
    **{f"attn.{name}": shape for name, shape in ATTENTION.items()},
    "ffn.shared_experts.w[13]": "S,H",
    "ffn.shared_experts.w2": "H,S",
}
FP4 = {"ffn.experts.E.w[13]": "I,H", "ffn.experts.E.w2": "H,I"}
BACKBONE = {
    "attn.compressor.(wkv|wgate).weight": (ANY, "D,H"),
    "attn.compressor.norm.weight": (ANY, "D"),
    "attn.indexer.weights_proj.weight": (ANY, "index_heads,H"),
    "attn.indexer.wk.weight": (ANY, "index_dim,D"),
    "attn.indexer.k_norm.weight": (ANY, "index_dim"),
    "engram.[qk]_weight": (ANY, "n,H"),
}
DRAFTER = {
    "main_norm.weight": (ANY, "H"),
    "norm.weight": (ANY, "H"),
    "markov_head.(embed|head).weight": (ANY, "V,markov"),
    "confidence_head.proj.weight": (ANY, "1,H+markov"),
}
MODEL = {"embed.weight": (ANY, "V,H"), "head.weight": (ANY, "V,H"), "norm.weight": (ANY, "H")}
VISION = re.compile(r"(vision|aligner)\..*|image_(start|end|newline)")  # loaded by the wrapper for images

# The linear layers that vLLM calls, so that factors of an adapter are added there. It takes the names of the released
# layout: wq_a with wkv and w1 with w3 are fused layers, each expert has its own factors.
ADAPTED = re.compile(
    r"base_model\.model\.layers\.\d+\."
    r"(attn\.(wq_a|wq_b|wkv|wo_b)|ffn\.shared_experts\.w[123]|ffn\.experts\.\d+\.w[123])\.lora_(A|B)\.weight"
)


def accepted(config: ModelConfig) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """All tensors that may be in a packed folder: a regular expression for the name, types and shape."""
    text = config.text
    sizes = {
        "H": text.hidden_size,
        "Q": text.q_lora_rank,
        "D": text.head_dim,
        "heads": text.num_attention_heads,
        "A": text.num_attention_heads * text.head_dim,
        "G": text.o_groups,
        "GO": text.o_groups * text.o_lora_rank,
        "I": text.moe_intermediate_size,
        "S": text.moe_intermediate_size * text.n_shared_experts,
        "V": text.vocab_size,
        "n": text.hc_mult,
        "nH": text.hc_mult * text.hidden_size,
        "M": (2 + text.hc_mult) * text.hc_mult,
        "index_heads": text.index_n_heads,
        "index_dim": text.index_head_dim,
        "markov": text.dspark_markov_rank,
    }
    found = [(re.escape(name), *_sized(row, sizes)) for name, row in MODEL.items()]
    for prefix, experts, extra in (
        (r"layers\.\d+\.", text.n_routed_experts, BACKBONE),
        (r"mtp\.\d+\.", text.dspark_n_routed_experts, DRAFTER),
    ):
        here = sizes | {"experts": experts}
        found += [(prefix + _pattern(name), *_sized(row, here)) for name, row in (BLOCK | extra).items()]
        fp8 = FP8 | (
            {"main_proj": f"H,{len(text.dspark_target_layer_ids)}*H"}
            if extra is DRAFTER
            else {
                "attn.indexer.wq_b": f"{text.index_n_heads * text.index_head_dim},Q",
                "engram.wkv": f"{text.hc_mult + 1}*H,{text.engram_hash_heads * text.engram_head_dim}",
            }
        )
        for name, shape in fp8.items():
            rows, columns = _shape(shape, here)
            found.append((prefix + _pattern(name) + r"\.weight", ("F8_E4M3",), (rows, columns)))
            found.append((prefix + _pattern(name) + r"\.scale", ("F8_E8M0",), (-(-rows // 32), -(-columns // 32))))
        for name, shape in FP4.items():
            rows, columns = _shape(shape, here)
            found.append((prefix + _pattern(name) + r"\.weight", ("I8",), (rows, columns // 2)))
            found.append((prefix + _pattern(name) + r"\.scale", ("F8_E8M0",), (rows, -(-columns // 32))))
    for layer, rows in zip(text.engram_layer_ids, text.engram_num_embeddings, strict=True):
        for part, kind, columns in (
            ("weight", "F8_E4M3", text.engram_head_dim),
            ("scale", "F8_E8M0", -(-text.engram_head_dim // 32)),
        ):
            found.append((rf"layers\.{layer}\.engram\.embed\.{part}", (kind,), (rows, columns)))
    return found


def _pattern(name: str) -> str:
    return name.replace(".", r"\.").replace(r"\.E\.", r"\.\d+\.")


def _sized(row: tuple[tuple[str, ...], str], sizes: dict[str, int]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return row[0], _shape(row[1], sizes)


def _shape(text: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(eval(part.replace("/", "//"), {}, sizes)) for part in text.split(","))
