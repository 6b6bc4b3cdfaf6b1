"""Assigns an optimizer method to every parameter: the V4.1 report's table (arXiv 2609.19969) as ordered name rules.

`optim` implements the methods and `model` names the parameters; the rules here map names to methods. Rules are made for
one model configuration: each rule must match at least one parameter of that model, otherwise `optim.assign` raises an
error.

The report does not say how some parameters are trained. These are our choices: each group of wo_a is a separate matrix
for Muon, since the projection is block-diagonal. Engram's q_weight and k_weight scale normalised vectors and are
trained like norm weights. Fused projections (vision mlp.w1, Engram wkv) are one matrix for Muon; only the vision wqkv
is split. The other matrices of the vision tower use Muon like those of the backbone. The three image token vectors are
trained by AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import nn

from model import ModelConfig
from optim import Group, Rule, assign
from train.lora.targets import BLOCK, LAYER

WEIGHT_DECAY = 0.1
# The schedule of the vision tower in optim.Schedule: frozen until the decay begins, then a smaller rate.
VISION_SCHEDULE = "vision"

STAGE = r"mtp\.\d+\."


def groups_of(model: nn.Module, rules: Sequence[Rule]) -> list[Group]:
    """Assign the trained parameters of a model to rules. A rule that matches a frozen parameter need not match a
    trained one. Raises ValueError for a parameter without a rule and for a rule without a parameter.
    """
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    rules = [replace(rule, optional=any(re.fullmatch(rule.pattern, name) for name in frozen)) for rule in rules]
    return assign([(name, p) for name, p in model.named_parameters() if p.requires_grad], rules)


def report_rules(
    config: ModelConfig,
    *,
    per_head: bool = True,
    tables: Literal["sinkhorn", "adamw"] = "sinkhorn",
    tables_lr_factor: float = 1.0,
    engram_lr_factor: float,
) -> list[Rule]:
    """Return the V4.1 report's rules for a model of this configuration.

    Values of ``per_head``, ``tables`` and ``tables_lr_factor`` other than the defaults depart from the report, for
    comparisons.

    Args:
        per_head: False orthogonalises wq_b, indexer.wq_b and the vision Q and K as whole matrices instead of head by
            head.
        tables: "adamw" trains token embedding, output head and Engram tables by AdamW instead of Sinkhorn balancing,
            with the same learning-rate factors and without weight decay.
        tables_lr_factor: multiplies the learning rate of these tables, since the updates of the two methods differ in
            size (the root mean square of Sinkhorn's update is 0.18, that of AdamW's is near 1).
        engram_lr_factor: multiplies the learning rate of the Engram tables only.

    Raises:
        ValueError: `tables` is neither "sinkhorn" nor "adamw".
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
    """Return the V4.1 report's rules for the parameters of a drafter; `report_rules` describes the arguments.

    Two rules are not in the report but our choice: the two factors of the Markov head, [vocabulary, rank], are trained
    like token embedding and output head, and the confidence head, which has a single row, is trained by AdamW.
    """
    return [
        Rule(STAGE + r"markov_head\.(embed|head)\.weight", tables, lr_factor=tables_lr_factor),
        *_block_rules(STAGE, config, per_head),
        Rule(STAGE + r"main_proj\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(STAGE + r"confidence_head\.proj\.weight", "adamw"),
        Rule(STAGE + r"(main_)?norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
    ]


def adamw_drafter_rules(config: ModelConfig) -> list[Rule]:
    """Return rules that train every parameter of a drafter by AdamW, with the V4.1 report's weight decay."""
    return [replace(rule, method="adamw", blocks=None) for rule in drafter_rules(config)]


def adamw_rules(config: ModelConfig, *, engram_lr_factor: float) -> list[Rule]:
    """Return the V4.1 report's rules with AdamW as the only method; weight decay, learning-rate factors and schedules
    stay as in the report.
    """
    rules = report_rules(config, engram_lr_factor=engram_lr_factor)
    return [replace(rule, method="adamw", blocks=None) for rule in rules]


def adapter_rules() -> list[Rule]:
    """Return a rule that trains the LoRA factors of an adapter by AdamW without weight decay, and nothing else."""
    return [Rule(r".*\.lora_(embedding_)?[AB]\..+", "adamw")]


def _block_rules(block: str, config: ModelConfig, per_head: bool) -> list[Rule]:
    """Return the rules for the parameters of one Transformer block, of the backbone or of a drafter."""
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
    if not text.kv_source_layer_ids:  # without layers that own a compressor there is no indexer either
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
        # The last norm of the vision tower, the aligner and the image token vectors train from the first step.
        Rule(r"vision\.norm\.weight", "adamw", weight_decay=WEIGHT_DECAY),
        Rule(r"aligner\.w[12]\.weight", "muon", weight_decay=WEIGHT_DECAY),
        Rule(r"aligner\.w[12]\.bias|image_(start|end|newline)", "adamw"),
    ]
