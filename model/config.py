"""The configuration of a V4.1 model: the keys of the released `config.json`, their defaults, and the rules that their
values must satisfy.

The defaults are the values of the released DeepSeek-V4.1-Flash. `ModelConfig.from_dict` reads the released JSON format
and reports all problems in one error; no other code in `model/` checks the configuration.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from model.kernels.switch import kernels_problem

MODEL_TYPE = "deepseek_v41"

# Keys of configuration files that do not affect the model, with the only value that V4.1 allows (None: any value).
_CARRIED = {
    "model_type": None,
    "dtype": None,
    "torch_dtype": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": None,
}
# Keys of the released config.json besides the fields below; other programs read them.
_TEXT_CONSTANTS = {
    "model_type": f"{MODEL_TYPE}_text",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "tie_word_embeddings": False,
}
_VISION_CONSTANTS = {"model_type": f"{MODEL_TYPE}_vision"}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class RopeScaling:
    """The YaRN interpolation of RoPE frequencies in layers with compressed KV (without scaling of the attention
    logits).
    """

    rope_type: str = "yarn"
    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class TextConfig:
    """The configuration of the text backbone, with the field names and defaults of the released config.json."""

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    num_key_value_heads: int = 1
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_lora_rank: int = 1024
    o_groups: int = 8
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    n_shared_experts: int = 1
    num_experts_per_tok: int = 6
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1.0e-20
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0, *[2] * 18, *[1] * 20, 0, 0, 0)
    compress_rope_theta: float = 160000.0
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 1048576
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1.0e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 16000000
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    initializer_range: float = 0.02
    pad_token_id: int = 2
    bos_token_id: int = 0
    eos_token_id: int = 1

    def ratio(self, layer: int) -> int:
        """The compression ratio of a backbone layer; 0 means that the layer only has a sliding window."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The Full layer whose compressed entries `layer` reads, or None for a window-only layer."""
        return max((s for s in self.kv_source_layer_ids if s <= layer), default=None) if self.ratio(layer) else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose selection `layer` uses, or None for a window-only layer."""
        return max((s for s in self.index_source_layer_ids if s <= layer), default=None) if self.ratio(layer) else None

    @property
    def decoder_start(self) -> int:
        """The first decoder layer, which is the last Full layer. All decoder layers read the entries that the first
        decoder layer computes from the output of the encoder.
        """
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers)

    @property
    def engram_hash_heads(self) -> int:
        """The number of Engram table rows that a token reads in a layer: one for each n-gram order (2..max) and hash
        head.
        """
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads


@dataclass(frozen=True)
class VisionConfig:
    """The configuration of the vision tower, with the field names and defaults of the released config.json."""

    num_hidden_layers: int = 32
    hidden_size: int = 1024
    num_attention_heads: int = 16
    intermediate_size: int = 2816
    patch_size: int = 14
    rope_theta: float = 10000.0
    downsample_ratio: int = 3
    max_image_tokens: int = 1024
    min_pixels: int = 295936
    max_wh_ratio: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a whole V4.1 model: `text` for the backbone, `vision` for an optional vision tower, and the
    token ids that both use.
    """

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig | None = None
    image_token_id: int = 129264
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2
    # released keys that do not affect the model; they are kept to be written again
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Build a configuration from the content of a released config.json. Raises ValueError that lists every problem
        with its key.
        """
        problems: list[str] = []
        raw = dict(raw)
        if raw.pop("model_type", MODEL_TYPE) != MODEL_TYPE:
            problems.append(f"model_type: must be {MODEL_TYPE!r}")
        if raw.pop("tie_word_embeddings", False):
            problems.append("tie_word_embeddings: must be false, because V4.1 does not tie the embedding and the head")
        for key in ("dtype", "torch_dtype"):  # the dtype of the files, which is read from the files themselves
            raw.pop(key, None)
        ids = {k: raw.pop(k) for k in ("image_token_id", "bos_token_id", "eos_token_id", "pad_token_id") if k in raw}
        for key, value in ids.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                problems.append(f"{key}: {value!r} must be a token id, 0 or more")
        text_raw = _mapping(raw, "text_config")
        vision_raw = _mapping(raw, "vision_config")
        scaling = _mapping(text_raw, "rope_scaling", "text_config.")
        if "type" in scaling:  # released files use either name for this key
            scaling.setdefault("rope_type", scaling.pop("type"))
        rope = _fill(RopeScaling, scaling, "text_config.rope_scaling", problems)
        if rope is not None:
            text_raw["rope_scaling"] = rope
        text = _fill(TextConfig, text_raw, "text_config", problems)
        if (
            vision_raw and vision_raw.get("num_hidden_layers") == 0
        ):  # how files of text-only models say that there is no vision tower
            vision_raw = {}
        vision = _fill(VisionConfig, dict(vision_raw), "vision_config", problems) if vision_raw else None
        misplaced = [f.name for f in dataclasses.fields(TextConfig) if f.name in raw and f.name not in _CARRIED]
        problems += [f"{key}: belongs into text_config" for key in misplaced]
        if text is not None:
            problems += text_problems(text)
        if vision is not None:
            problems += vision_problems(vision)
        if problems:
            raise ValueError("the model configuration has these problems:\n  " + "\n  ".join(problems))
        raw.pop("architectures", None)
        return cls(text=text, vision=vision, extra=raw, **ids)

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read the file `config.json` of a checkpoint folder."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; a checkpoint folder must contain config.json and the weights"
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(raw, dict) or not isinstance(raw.get("text_config"), dict) or not raw["text_config"]:
            raise ValueError(f"{path}: must be a JSON object with the released keys, including text_config")
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The content of a config.json with the keys of the released file; `from_dict(to_dict())` gives an equal
        configuration.

        Token ids are written into `text_config` only if they differ from the released ones. A model without vision
        tower is written with a tower of zero layers, because other programs read a missing `vision_config` as the
        released tower.
        """
        vision = {**_VISION_CONSTANTS, **(_plain(self.vision) if self.vision else {"num_hidden_layers": 0})}
        text = {**_TEXT_CONSTANTS, **_plain(self.text)}
        text = {key: value for key, value in text.items() if key not in _IDS or value != getattr(TextConfig, key)}
        return {
            "model_type": MODEL_TYPE,
            "architectures": ["DeepseekV41ForCausalLM"],
            "text_config": text,
            "vision_config": vision,
            "image_token_id": self.image_token_id,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": False,
            **self.extra,
        }


@dataclass(frozen=True)
class ForwardOptions:
    """Options of the forward pass; none of them changes the model's parameters.

    attention: "sparse" is the implementation with linear cost in the sequence length, "dense" the masked reference
        implementation.
    kernels: "triton" runs the Triton kernels of `model.kernels`, "plain" the PyTorch functions that they replace, and
        "auto" the Triton kernels on CUDA devices if Triton is installed.
    kv_quant: whether the shared main KV is rounded to FP4 by fake quantisation (QAT); window KV and indexer keys are
        always rounded.
    expert_quant: whether the weights of routed experts are rounded to MXFP4, as the released checkpoint stores them;
        the trained weights stay fp32, and their gradients are those of the rounded weights (QAT, see
        model/rounding.py).
    dense_quant: whether the dense projections that the released checkpoint stores as FP8 are rounded to FP8 (QAT, as
        for `expert_quant`).
    engram_quant: whether the rows of the Engram tables are rounded to FP8, as the released checkpoint stores them (QAT,
        as for `expert_quant`).
    candidate_pool: whether the later indexers are restricted to the candidate blocks of the first decoder indexer.
    decoder_replay: whether decoder layers process only the last `sliding_window` tokens of a prompt (SWA bounded
        replay). Generation skips the earlier prompt tokens in decoder layers; training masks the window keys that
        generation would not compute. In training, the prompt of a document ends before its first supervised token.
    stream_dtype: dtype of the residual streams of a model with fp32 parameters. With "bf16" the streams are rounded
        after every sublayer, as in the released code, which halves the memory that activation checkpointing needs. The
        streams are always mixed in fp32.
    recompute: whether every block uses activation checkpointing. The entries and experts that a block selected are kept
        in memory, so they are not selected again.
    keep_combined: with `recompute` and experts split over ranks, whether to keep the received results of the experts
        (one hidden vector per token and layer) instead of exchanging them again.
    dispatch: format in which tokens go to routed experts. "fp8" rounds the inputs of routed experts to FP8 (groups of
        32 with a power-of-two scale, as the window KV) on any number of ranks; between ranks, FP8 inputs take half the
        bytes of bf16 inputs. "plain" does not round.
    gather: format in which a rank sends compressed entries and index keys to other ranks if rows are split over ranks
        (context parallelism). "packed" sends the codes and scales of the quantised formats and gives the same values;
        for the released model in bf16, it sends 356 instead of 1,280 bytes per entry; it needs kv_quant. "plain" sends
        the values.
    offload: with `recompute`, "inputs" keeps the inputs of every block (its residual streams) in host memory between
        the forward and the backward pass; on CUDA this memory is pinned, and copies overlap with computation. "off"
        keeps the inputs on the device.
    frozen: how the frozen weights of a quantised checkpoint, for example of a teacher or under an adapter, are stored
        in memory: "packed" as codes and scales, or "values" as unpacked numbers. The results are the same.
    tables: where the packed Engram tables of a frozen model are stored: "device", or "host", which maps them from the
        checkpoint's files into host memory and copies only the rows that are looked up. The results are the same.
    train_indexer: whether to compute the KL loss of the indexers; if not, the parameters of the indexers get zero
        gradients.
    probe: whether to also compute the attention mass over all visible entries, at quadratic cost (see
        `model.indexer_recall`).
    """

    attention: Literal["sparse", "dense"] = "sparse"
    kernels: Literal["auto", "plain", "triton"] = "auto"
    kv_quant: bool = True
    expert_quant: bool = False
    dense_quant: bool = False
    engram_quant: bool = False
    candidate_pool: bool = True
    decoder_replay: bool = False
    stream_dtype: Literal["fp32", "bf16"] = "fp32"
    recompute: bool = False
    keep_combined: bool = True
    dispatch: Literal["plain", "fp8"] = "plain"
    gather: Literal["plain", "packed"] = "plain"
    offload: Literal["off", "inputs"] = "off"
    frozen: Literal["packed", "values"] = "packed"
    tables: Literal["device", "host"] = "device"
    train_indexer: bool = True
    probe: bool = False

    def recomputing(self, on: bool) -> ForwardOptions:
        """A copy of the options in which `recompute` is switched on or off; if it is off, `offload` is switched off
        too.
        """
        return replace(self, recompute=on, offload=self.offload if on else "off")

    def without_weight_rounding(self) -> ForwardOptions:
        """A copy of the options for a model whose weights are used as they are stored, such as a teacher."""
        return replace(self, expert_quant=False, dense_quant=False, engram_quant=False)

    def __post_init__(self) -> None:
        if self.attention not in ("sparse", "dense"):
            raise ValueError(f"runtime.attention: {self.attention!r} is unknown, allowed are 'sparse' and 'dense'")
        if self.stream_dtype not in ("fp32", "bf16"):
            raise ValueError(f"runtime.stream_dtype: {self.stream_dtype!r} is unknown, allowed are 'fp32' and 'bf16'")
        if self.dispatch not in ("plain", "fp8"):
            raise ValueError(f"runtime.dispatch: {self.dispatch!r} is unknown, allowed are 'plain' and 'fp8'")
        if self.gather not in ("plain", "packed"):
            raise ValueError(f"runtime.gather: {self.gather!r} is unknown, allowed are 'plain' and 'packed'")
        if self.gather == "packed" and not self.kv_quant:
            raise ValueError("runtime.gather: 'packed' needs runtime.kv_quant=true, whose values it packs")
        if self.offload not in ("off", "inputs"):
            raise ValueError(f"runtime.offload: {self.offload!r} is unknown, allowed are 'off' and 'inputs'")
        if self.offload == "inputs" and not self.recompute:
            raise ValueError(
                "runtime.offload: 'inputs' needs runtime.recompute=true, because without recomputation all activations "
                "of a block are kept, and not only its inputs"
            )
        if self.frozen not in ("packed", "values"):
            raise ValueError(f"runtime.frozen: {self.frozen!r} is unknown, allowed are 'packed' and 'values'")
        if self.tables not in ("device", "host"):
            raise ValueError(f"runtime.tables: {self.tables!r} is unknown, allowed are 'device' and 'host'")
        if self.tables == "host" and self.frozen != "packed":
            raise ValueError(
                "runtime.tables: 'host' needs runtime.frozen=packed, because only packed tables are mapped"
            )
        if problem := kernels_problem(self.kernels):
            raise ValueError(f"runtime.kernels: {problem}")


@dataclass(frozen=True)
class LossWeights:
    """The weights of the two auxiliary losses that are added to the language-model loss (V4.1 report, optimisation).

    indexer_kl: weight of the KL loss of the indexers; with 0 the indexers are not trained.
    router_balance: weight of the sequence-level balance loss of the routers.
    """

    indexer_kl: float = 1.0
    router_balance: float = 1.0e-4

    def __post_init__(self) -> None:
        for key in ("indexer_kl", "router_balance"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ValueError(f"loss.{key}: is {getattr(self, key)}, must be 0 or more and finite")


@dataclass(frozen=True)
class DraftObjective:
    """The weights of the terms in a drafter's loss (see `model.dspark`); the defaults are those of DeepSpec (arXiv
    2607.05147).

    ce: weight of the cross-entropy of the true tokens.
    l1: weight of the L1 distance from the backbone's distribution.
    confidence: weight of the error of the confidence head.
    detach_confidence: whether the error of the confidence head trains only the confidence head.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    detach_confidence: bool = True


def text_problems(c: TextConfig) -> list[str]:
    """A list of the broken rules of a text configuration, each as 'key: what is wrong, what is allowed'."""
    lists = list(_layer_list_problems(c))  # the layer schedule can be checked only if these lists are valid
    found = [*_size_problems(c), *lists, *([] if lists else _schedule_problems(c)), *_engram_problems(c)]
    return [f"text_config.{problem}" for problem in found]


def drafter_problems(c: TextConfig) -> list[str]:
    """A list of the broken rules among the settings of a DSpark drafter in a text configuration. A model without a
    drafter need not satisfy these rules.
    """
    positive = "num_nextn_predict_layers dspark_block_size dspark_markov_rank dspark_n_routed_experts"
    found = [f"{key}: is {getattr(c, key)}, must be positive" for key in positive.split() if getattr(c, key) < 1]
    layers, chosen = c.num_hidden_layers, c.dspark_num_experts_per_tok
    if not c.dspark_target_layer_ids:
        found.append("dspark_target_layer_ids: is empty, must name the backbone's layers that the drafter reads")
    for layer in c.dspark_target_layer_ids:
        if not 0 <= layer < layers:
            found.append(f"dspark_target_layer_ids: layer {layer} is out of range 0..{layers - 1}")
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        found.append(f"dspark_noise_token_id: is {c.dspark_noise_token_id}, must be a token, 0..{c.vocab_size - 1}")
    if not 1 <= chosen <= c.dspark_n_routed_experts:
        found.append(f"dspark_num_experts_per_tok: is {chosen}, must be 1..{c.dspark_n_routed_experts}, its experts")
    return found


def _size_problems(c: TextConfig) -> Iterator[str]:
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
        "o_lora_rank o_groups moe_intermediate_size n_routed_experts num_experts_per_tok sliding_window index_n_heads "
        "index_head_dim index_topk candidate_topk_blocks candidate_block_size hc_mult hc_sinkhorn_iters"
    )
    for key in positive.split():
        if getattr(c, key) <= 0:
            yield f"{key}: is {getattr(c, key)}, must be positive"
    for key, only in (
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
    ):
        if getattr(c, key) != only:
            yield f"{key}: is {getattr(c, key)!r}, V4.1 has only {only!r}"
    for key in ("rms_norm_eps", "hc_eps", "swiglu_limit", "rope_theta", "compress_rope_theta", "initializer_range"):
        if not getattr(c, key) > 0:  # NaN neither
            yield f"{key}: is {getattr(c, key)}, must be positive"
    for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
        if not getattr(c.rope_scaling, key) > 0:
            yield f"rope_scaling.{key}: is {getattr(c.rope_scaling, key)}, must be positive"
    if c.num_nextn_predict_layers < 0:
        yield f"num_nextn_predict_layers: is {c.num_nextn_predict_layers}, must be 0 (no drafter) or more"
    if c.rope_scaling.rope_type != "yarn":
        yield "rope_scaling.rope_type: V4.1 uses 'yarn'"
    if c.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim: is {c.qk_rope_head_dim}, must be even (rotated pairs)"
    for key in ("head_dim", "index_head_dim"):
        if c.qk_rope_head_dim > getattr(c, key):
            yield f"qk_rope_head_dim: is larger than {key} {getattr(c, key)}"
    if c.o_groups <= 0 or c.num_attention_heads % c.o_groups:
        yield f"o_groups: is {c.o_groups}, must divide num_attention_heads {c.num_attention_heads}"
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok: is {c.num_experts_per_tok}, there are only {c.n_routed_experts} routed experts"


def _layer_list_problems(c: TextConfig) -> Iterator[str]:
    """The problems of the per-layer lists: wrong lengths, and layer numbers that the model does not have."""
    layers, drafter = c.num_hidden_layers, c.num_nextn_predict_layers
    if len(c.compress_ratios) not in (layers, layers + drafter):
        yield (
            f"compress_ratios: has {len(c.compress_ratios)} entries, must have one for each of the {layers} layers "
            f"(and may go on with the {drafter} drafter layers)"
        )
        return
    for layer, ratio in enumerate(c.compress_ratios):
        if ratio < 0:
            yield f"compress_ratios: layer {layer} has ratio {ratio}, must be 0 (window only) or more"
        if layer >= layers and ratio != 0:
            yield f"compress_ratios: drafter layer {layer} has ratio {ratio}, must be 0"
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, key)
        for layer in ids:
            if not 0 <= layer < layers:
                yield f"{key}: layer {layer} is out of range 0..{layers - 1}"
        for before, after in zip(ids, ids[1:], strict=False):
            if after <= before:
                yield f"{key}: layer {after} follows {before}, ids must strictly increase"


def _schedule_problems(c: TextConfig) -> Iterator[str]:
    """The problems of the CSA2 schedule, which sets which layers compress KV, which score entries and which reuse a
    selection.
    """
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        for layer in getattr(c, key):
            if c.ratio(layer) == 0:
                yield f"{key}: layer {layer} has compress ratio 0, a window-only layer is no source"
    for layer in c.kv_source_layer_ids:
        if layer not in c.index_source_layer_ids:
            yield f"kv_source_layer_ids: layer {layer} must also be in index_source_layer_ids"
    for layer in range(c.num_hidden_layers):
        ratio, source = c.ratio(layer), c.kv_source(layer)
        if ratio and source is None:
            yield f"compress_ratios: layer {layer} has ratio {ratio} but no kv source at or before it"
        elif source is not None and ratio and c.ratio(source) != ratio:
            yield (
                f"compress_ratios: layer {layer} has ratio {ratio} but its kv source, layer {source}, has ratio "
                f"{c.ratio(source)}; they must be equal"
            )
    if c.candidate_source_layer_id != -1 and c.candidate_source_layer_id not in c.kv_source_layer_ids:
        yield (
            f"candidate_source_layer_id: layer {c.candidate_source_layer_id} must be one of kv_source_layer_ids "
            f"{list(c.kv_source_layer_ids)}, or -1 for off"
        )


def _engram_problems(c: TextConfig) -> Iterator[str]:
    if not c.engram_layer_ids:
        return
    if c.engram_max_ngram_size < 2:
        yield f"engram_max_ngram_size: is {c.engram_max_ngram_size}, must be at least 2"
    for key in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
        if getattr(c, key) < 1:
            yield f"{key}: is {getattr(c, key)}, must be positive"
    if c.engram_num_embeddings and len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        yield (
            f"engram_num_embeddings: has {len(c.engram_num_embeddings)} entries for {len(c.engram_layer_ids)} Engram "
            "layers; give one each, or none to have them computed"
        )


def vision_problems(v: VisionConfig) -> Iterator[str]:
    """The broken rules of a vision configuration."""
    if v.num_attention_heads < 1 or v.hidden_size % v.num_attention_heads:
        yield f"vision_config.num_attention_heads: is {v.num_attention_heads}, must divide hidden_size {v.hidden_size}"
    elif (v.hidden_size // v.num_attention_heads) % 4:
        yield "vision_config.hidden_size: the head size must be a multiple of 4 (rows and columns, rotated pairs)"
    if v.min_pixels < 0:
        yield f"vision_config.min_pixels: is {v.min_pixels}, must be 0 or more"
    if v.max_wh_ratio is not None and v.max_wh_ratio <= 0:
        yield f"vision_config.max_wh_ratio: is {v.max_wh_ratio}, must be positive or null"
    positive = "patch_size downsample_ratio max_image_tokens num_hidden_layers intermediate_size rope_theta"
    for key in positive.split():
        if getattr(v, key) < 1:
            yield f"vision_config.{key}: is {getattr(v, key)}, must be positive"


def _mapping(raw: dict[str, Any], key: str, prefix: str = "") -> dict[str, Any]:
    """Remove the section `key` from `raw` and return the section, or an empty mapping if the key is missing or null.
    Raises ValueError if the section is not a mapping.
    """
    value = raw.pop(key, None)
    if not isinstance(value, dict | NoneType):
        raise ValueError(f"{prefix}{key}: must be a mapping of the released keys, got {value!r}")
    return dict(value or {})


def _fill(cls: type, raw: dict[str, Any], where: str, problems: list[str]) -> Any:
    """Make an instance of dataclass `cls` from `raw`. Unknown keys and values of a wrong type are added to
    `problems`.
    """
    known = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    defaults = cls()
    before = len(problems)
    for key, value in raw.items():
        if key in _CARRIED:
            if _CARRIED[key] is not None and value != _CARRIED[key]:
                problems.append(f"{where}.{key}: is {value!r}, V4.1 has only {_CARRIED[key]!r}")
            continue
        if key not in known:
            problems.append(f"{where}.{key}: unknown key")
            continue
        default = getattr(defaults, key)
        if isinstance(default, tuple):
            ok = isinstance(value, (list, tuple)) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
            value = tuple(value) if ok else value
        elif isinstance(default, bool):
            ok = isinstance(value, bool)
        elif isinstance(default, int):
            ok = isinstance(value, int) and not isinstance(value, bool)
        elif isinstance(default, float) or default is None:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            ok = number or (default is None and value is None)
        else:
            ok = isinstance(value, type(default))
        if not ok:
            kind = {tuple: "a list of integers", float: "a finite number", type(None): "a finite number or null"}
            want = kind.get(type(default), type(default).__name__)
            problems.append(f"{where}.{key}: {value!r} must be {want}")
            continue
        values[key] = value
    return cls(**values) if len(problems) == before else None


def _plain(config: TextConfig | VisionConfig) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(config).items()}
