"""Which parameter is trained how: the table of the V4.1 report (arXiv 2609.19969, optimisation) as ordered name rules.

`optim` knows methods and `model` knows names; the rules here join them. They are made for one configuration: a rule
exists only if the model has parameters for it, so a rule without a parameter is a mistake, which `optim.assign`
reports.

Our choices, where the report is silent: each group of wo_a is a matrix of its own (the projection is block-diagonal);
Engram's q_weight and k_weight scale normalised vectors and are trained like norm weights; fused projections other than
the vision wqkv (vision mlp.w1, Engram wkv) are one matrix; the vision tower's other matrices use Muon like the
backbone's; the three image token vectors are plain vectors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

from model import ModelConfig
from optim import Rule
from train.lora.targets import BLOCK, LAYER

WEIGHT_DECAY = 0.1
VISION_SCHEDULE = (
    "vision"  # name of the tower's factor in optim.Schedule: frozen until decay begins, then a smaller rate
)

STAGE = r"mtp\.\d+\."


def report_rules(
    config: ModelConfig,
    *,
    per_head: bool = True,
    tables: Literal["sinkhorn", "adamw"] = "sinkhorn",
    tables_lr_factor: float = 1.0,
    engram_lr_factor: float,
) -> list[Rule]:
    """The report's rules for a model of this configuration.

    Three switches are for comparisons. `per_head=False` orthogonalises wq_b, indexer.wq_b and the vision Q and K whole
    instead of head by head. `tables="adamw"` trains embedding, head and Engram tables by AdamW, with the same
    learning-rate factors and no decay; `tables_lr_factor` multiplies these factors, since the updates of the two
    methods differ in size (Sinkhorn's has a root mean square of 0.18, AdamW's is near 1). `engram_lr_factor` applies to
    the Engram tables only. Raises ValueError for another value of `tables`.
    """
    if tables not in ("sinkhorn", "adamw"):
        raise ValueError(f"tables: must be 'sinkhorn' or 'adamw', got {tables!r}")
    rules = [
        Rule(r"(embed|head)\.weight", tables, lr_factor=tables_lr_factor),
        *_block_rules(LAYER, config, per_head),
        *_compression_rules(config, per_head),
        Rule(r"norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
    ]
    if config.text.engram_layer_ids:
        rules += [
            Rule(LAYER + r"engram\.embed\.weight", tables, lr_factor=engram_lr_factor * tables_lr_factor),
            Rule(LAYER + r"engram\.wkv\.weight", "muon", weight_decay=WEIGHT_DECAY),
            Rule(LAYER + r"engram\.[qk]_weight", "adamw", weight_decay=WEIGHT_DECAY),
        ]
    return rules + _vision_rules(config, per_head)


def drafter_rules(
    config: ModelConfig,
    *,
    per_head: bool = True,
    tables: Literal["sinkhorn", "adamw"] = "sinkhorn",
    tables_lr_factor: float = 1.0,
) -> list[Rule]:
    """The report's rules for a drafter's parameters. Our choice: the Markov head's two factors, [vocabulary, rank], are
    trained like token embedding and head; the confidence head, a single row, like other vectors.
    """
    return [
        Rule(STAGE + r"markov_head\.(embed|head)\.weight", tables, lr_factor=tables_lr_factor),
        *_block_rules(STAGE, config, per_head),
        Rule(STAGE + r"main_proj\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(STAGE + r"confidence_head\.proj\.weight", "adamw"),
        Rule(STAGE + r"(main_)?norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
    ]


def adamw_drafter_rules(config: ModelConfig) -> list[Rule]:
    """AdamW for every parameter of a drafter, with the report's decay."""
    return [replace(rule, method="adamw", blocks=None) for rule in drafter_rules(config)]


def adamw_rules(config: ModelConfig, *, engram_lr_factor: float) -> list[Rule]:
    """AdamW for every parameter, with the report's decay, rate factors and schedules: only the method differs."""
    rules = report_rules(config, engram_lr_factor=engram_lr_factor)
    return [replace(rule, method="adamw", blocks=None) for rule in rules]


def adapter_rules() -> list[Rule]:
    """AdamW without decay for the factors of an adapter; nothing else is trained."""
    return [Rule(r".*\.lora_(embedding_)?[AB]\..+", "adamw")]


def _block_rules(block: str, config: ModelConfig, per_head: bool) -> list[Rule]:
    """Rules for what every block has, in the backbone and in a drafter."""
    text, attn = config.text, block + r"attn\."
    heads = ((text.num_attention_heads, text.head_dim),) if per_head else None
    groups = ((text.o_groups, text.o_lora_rank),)
    return [
        Rule(attn + r"(wq_a|wkv|wo_b)\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(attn + r"wq_b\.weight", "muon", blocks=heads, weight_decay=WEIGHT_DECAY),
        Rule(attn + r"wo_a\.weight", "muon", blocks=groups, weight_decay=WEIGHT_DECAY),
        Rule(attn + r"(q|kv)_norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
        Rule(attn + r"attn_sink", "adamw"),
        Rule(block + r"ffn\.(gate|shared_experts\.w[123])\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(block + r"ffn\.experts\.w[123]", "muon", weight_decay=WEIGHT_DECAY),
        Rule(block + r"hc_(attn|ffn)\.fn", "muon", weight_decay=WEIGHT_DECAY),
        Rule(block + r"hc_(attn|ffn)\.(base|scale)", "adamw"),
        Rule(block + r"(attn|ffn)_norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
    ]


def _compression_rules(config: ModelConfig, per_head: bool) -> list[Rule]:
    text, attn = config.text, LAYER + r"attn\."
    if not text.kv_source_layer_ids:  # every kv source is an index source too
        return []
    index_heads = ((text.index_n_heads, text.index_head_dim),) if per_head else None
    return [
        Rule(attn + r"compressor\.(wkv|wgate)\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(attn + r"indexer\.(weights_proj|wk)\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(attn + r"indexer\.wq_b\.weight", "muon", blocks=index_heads, weight_decay=WEIGHT_DECAY),
        Rule(attn + r"(compressor\.norm|indexer\.k_norm)\.weight", "adamw", weight_decay=WEIGHT_DECAY),
    ]


def _vision_rules(config: ModelConfig, per_head: bool) -> list[Rule]:
    vision = config.vision
    if vision is None:
        return []
    heads = vision.num_attention_heads if per_head else 1
    rows = vision.hidden_size // heads
    wqkv = ((heads, rows), (heads, rows), (1, vision.hidden_size))
    matrix = partial(Rule, method="muon", weight_decay=WEIGHT_DECAY, schedule=VISION_SCHEDULE)
    return [
        matrix(BLOCK + r"attn\.wqkv\.weight", blocks=wqkv),
        matrix(BLOCK + r"(attn\.wo|mlp\.w[12])\.weight"),
        matrix(r"vision\.patch_embed\.proj\.weight"),
        Rule(r"vision\.patch_embed\.proj\.bias|" + BLOCK + r"attn\.(wqkv|wo)\.bias", "adamw", schedule=VISION_SCHEDULE),
        Rule(BLOCK + r"norm[12]\.weight", "adamw", weight_decay=WEIGHT_DECAY, schedule=VISION_SCHEDULE),
        # The tower's last norm, the aligner and the image token vectors train from the first step.
        Rule(r"vision\.norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
        Rule(r"aligner\.w[12]\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(r"aligner\.w[12]\.bias|image_(start|end|newline)", "adamw"),
    ]
