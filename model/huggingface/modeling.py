"""`DeepseekV41ForCausalLM`: the model with the interface of transformers."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.integrations import deepspeed
from transformers.utils import ModelOutput

from model.backbone import BackboneOutput, DeepseekV41
from model.checkpoint.load import load_pretrained
from model.checkpoint.names import COMPANIONS, SCALES
from model.checkpoint.released import INDEX, read_headers
from model.checkpoint.save import SHARD_BYTES, save_pretrained
from model.config import ForwardOptions
from model.dspark import Drafter, load_drafter
from model.huggingface.batch import batch_of
from model.huggingface.configuration import DeepseekV41Config
from model.huggingface.counts import KEY as STEP_COUNTS
from model.huggingface.counts import denominators_of
from model.huggingface.decoding import Decoding
from model.huggingface.folders import (
    IGNORED,
    bytes_of,
    device_of,
    dtype_of,
    local_folder,
    new_model,
    read_config,
    rename_released,
)
from model.huggingface.speculation import continued, hindrances
from model.layout import SequenceLayout
from model.packed import PackedWeight, holds_packed
from model.placement import load_where_it_fits
from model.training_losses import LossDenominators, compute_losses, count_denominators

_OF_WEIGHTS = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|{re.escape(INDEX)}|{re.escape(SCALES)}|config\.json")


@dataclass
class DeepseekV41Output(ModelOutput):
    """The output of the model. loss: the 0-d loss. logits: fp32 [B, S or logits_to_keep, V]. hidden_states: for each
    block, the residual streams [B, S, n, d] that enter the block.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class DeepseekV41HiddenStates(ModelOutput):
    """The output of a model without its head: last_hidden_state [B, S, d] is the output of the final norm, from which
    the head would compute logits.
    """

    last_hidden_state: Tensor | None = None


class DeepseekV41ForCausalLM(PreTrainedModel, GenerationMixin):
    """The V4.1 model with the interface of transformers; its attribute `model` is the wrapped `DeepseekV41`.

    A model with Engram layers needs its tokenizer, because Engram maps token ids with the same normalised text to one
    id. `from_pretrained` finds the tokenizer in the checkpoint folder; for a new model, the tokenizer is an argument of
    the constructor.

    Attributes:
        training_losses: the losses in training mode. "full": the indexer loss and the balance loss are added to the
            trainer's own loss, with the weights in `model.loss_weights`, and router biases are updated. After every
            step of an optimizer that holds the model's parameters, the router biases are adjusted by the expert load of
            the whole step, over all processes. "lm": only the trainer's own loss is used, and indexers and router
            biases do not change.
        router_bias_rate: the size of the change of a router bias in one step.
        drafter: the drafter of the checkpoint folder, or None. The drafter is not trained: the drafter's weights are
            not among the model's parameters. `generate` uses the drafter for speculative decoding, see
            `prepare_inputs_for_generation`.

    The added losses (indexer loss and balance loss) are means over a micro-batch. If labels are given, the added losses
    are weighted by the micro-batch's fraction of the step's targets (`num_items_in_batch`), so that the losses of
    micro-batches and processes add up. If no labels are given (trainers that compute their loss from logits or hidden
    states), the added losses change the gradient but not the reported loss, and are divided by the number of forward
    passes in the previous step.
    """

    config_class = DeepseekV41Config
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]
    hf_device_map: dict[str, int | str]  # set if weights are offloaded: the place of each part of the model
    # For peft: renames the weights of an adapter that was trained on the bare `DeepseekV41`.
    _checkpoint_conversion_mapping = {r"^(?!model\.)": "model."}

    def __init__(
        self,
        config: DeepseekV41Config,
        model: DeepseekV41 | None = None,
        runtime: ForwardOptions | None = None,
        tokenizer: Tokenizer | PreTrainedTokenizerFast | None = None,
        drafter: Drafter | None = None,
    ):
        super().__init__(config)
        if model is None:
            model = new_model(config.to_model_config(), runtime, tokenizer)
        self.model = model
        self._drafter = (drafter,)  # in a tuple: not a submodule
        self.training_losses: Literal["full", "lm"] = "full"
        self.router_bias_rate = 1e-3
        self._load: Tensor | None = None  # int64 [layers, 2, E]: tokens routed to each expert since the last step
        self._passes, self._passes_of_step = 0, 1  # forward passes since the last step, and in the last step
        # Small files (tokenizer etc.) of the loaded folder, which are saved again
        self.companions: dict[str, bytes] = {}
        if tokenizer is not None:
            backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
            self.companions["tokenizer.json"] = backend.to_str(pretty=True).encode()
        self.register_load_state_dict_pre_hook(rename_released)
        self.post_init()

    def init_weights(self) -> None:
        """Does nothing, because the model's weights are already initialised or loaded."""

    @property
    def drafter(self) -> Drafter | None:
        return self._drafter[0]

    def _apply(self, fn: Any, recurse: bool = True) -> DeepseekV41ForCausalLM:
        """Move or cast the model and its drafter."""
        if self.drafter is not None:
            self.drafter._apply(fn, recurse)
        return super()._apply(fn, recurse)

    # Folders

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        *,
        config: DeepseekV41Config | None = None,
        dtype: torch.dtype | str | None = None,
        torch_dtype: torch.dtype | str | None = None,
        device_map: Any = None,
        max_memory: Mapping[int | str, int | str] | None = None,
        offload_folder: str | Path | None = None,
        runtime: ForwardOptions | None = None,
        training_losses: Literal["full", "lm"] = "full",
        drafter: bool = True,
        packed: bool = True,
        **others: Any,
    ) -> DeepseekV41ForCausalLM:
        """Load a model in evaluation mode from a checkpoint folder with the file layout of the released checkpoint, or
        from the Hugging Face hub.

        dtype: the dtype of the matrices; None or "auto" keeps the dtype of the folder (quantised weights become bf16).
        device_map: one device, {"": device} or "auto". With "auto", weights that do not fit on the first device of
        max_memory are stored on other devices, in host memory, or on disk in offload_folder until they are used
        (`model/placement.py`), and such a model cannot be trained.
        max_memory: the memory to use on each device, in bytes or as text like "10GiB"; the keys are GPU numbers and
        "cpu". None means all free memory.
        training_losses: see `DeepseekV41ForCausalLM`.
        drafter: whether to load the drafter if the folder has one.
        packed: keep the weights of a quantised folder in their stored form and frozen (`model/packed.py`), so that only
        adapters and other weights can be trained; this has no effect for a plain folder.
        config: a configuration to use instead of the folder's config.json; a configuration that describes another model
        raises ValueError.
        Also raises the errors of `model.load_pretrained`, and TypeError for an option that this model does not support.
        """
        folder = local_folder(pretrained_model_name_or_path, others)
        if unknown := {key for key, value in others.items() if key not in IGNORED and value is not None}:
            raise TypeError(f"from_pretrained: {', '.join(sorted(unknown))}: not supported for this model")
        own = DeepseekV41Config(**read_config(folder))
        config = config or own
        if config.to_model_config() != own.to_model_config():
            raise ValueError(f"the configuration given is not the one in {folder}; change it there")
        dtype = dtype_of(dtype if dtype is not None else torch_dtype, own)
        places: dict[str, int | str] = {}
        if device_map == "auto":
            core, places = load_where_it_fits(folder, dtype, max_memory, offload_folder, runtime, packed)
        else:
            core = load_pretrained(folder, dtype=dtype, device=device_of(device_map), runtime=runtime, packed=packed)
        config.dtype, config._name_or_path = dtype, str(pretrained_model_name_or_path)
        drafts = drafter and any(name.startswith("mtp.") for name in read_headers(folder))
        model = cls(config, core, drafter=load_drafter(folder, core) if drafts else None)
        model.training_losses = training_losses
        if len(places) > 1:
            model.hf_device_map = {f"model.{name}".rstrip("."): place for name, place in places.items()}
        model.companions = {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}
        if "generation_config.json" in model.companions:
            model.generation_config = GenerationConfig.from_pretrained(folder)
        return model.eval()

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        max_shard_size: int | str = SHARD_BYTES,
        format: Literal["plain", "released"] = "plain",
        push_to_hub: bool = False,
        variant: str | None = None,
        **_: Any,
    ) -> None:
        """Write a folder with the file layout of the released checkpoint. The folder contains the weights of model and
        drafter, config.json, and the small files (such as the tokenizer's) of the folder that the model was loaded
        from.

        format="released" quantises the weights as in the released checkpoint. Other files in the folder, such as those
        of a tokenizer, are kept. The new weights are moved into the folder only after all of them have been written.
        Raises ValueError for an option that this model does not support, and for a model with an adapter.
        """
        if push_to_hub or variant:
            raise ValueError("save_pretrained: push_to_hub and variant are not supported for this model")
        if not is_main_process:
            return
        if hasattr(self, "hf_device_map"):
            raise ValueError("save_pretrained: the weights are offloaded; load the model without device_map='auto'")
        own = {name: tensor.data_ptr() for name, tensor in self.state_dict().items()}
        if any(own.get(name) != tensor.data_ptr() for name, tensor in (state_dict or {}).items()):
            raise ValueError("save_pretrained: the model's own weights are written; load the state_dict into it first")
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
            new = Path(work) / "new"
            save_pretrained(self.model, new, shard_bytes=bytes_of(max_shard_size), format=format, drafter=self.drafter)
            self.generation_config.save_pretrained(new)
            for name, content in self.companions.items():
                if name != "generation_config.json" and not (folder / name).exists():
                    (new / name).write_bytes(content)
            for old in folder.iterdir():
                if _OF_WEIGHTS.fullmatch(old.name):
                    old.unlink()
            for path in new.iterdir():
                shutil.move(path, folder / path.name)

    # Computation

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        decoding: Decoding | None = None,
        use_cache: bool | None = None,
        step_counts: Tensor | None = None,
        **others: Any,
    ) -> DeepseekV41Output | tuple:
        """Run the model. The arguments are as in `DeepseekV41.forward`; padding may be on the left or on the right.

        labels: int64 [B, S], not shifted; positions with label -100 are ignored. The loss is the mean over the other
        positions (the targets). If `num_items_in_batch` (the number of targets in all micro-batches of a step) is
        given, the loss is instead the sum over targets divided by `num_items_in_batch`, so that the losses of
        micro-batches add up. In training mode, `training_losses` may add further losses. position_ids that restart at 0
        within a row mark packed documents. decoding: the cache of a `generate` call, see `Decoding`. step_counts: the
        counts of the whole step, which `count_whole_steps` adds to a batch. use_cache has no effect: a forward pass
        over whole sequences keeps no cache.
        """
        self._refuse_noise()
        if decoding is not None:
            return DeepseekV41Output(logits=decoding.next_logits(input_ids, attention_mask))
        batch = batch_of(input_ids, attention_mask, position_ids, seq_lens, vision_token_types, others)
        images = dict(pixel_values=pixel_values, image_grid_hws=image_grid_hws)
        want_streams = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if self._trains_fully():
            counts = denominators_of(step_counts, labels)
            result = self._training_pass(
                batch, images, labels, num_items_in_batch, logits_to_keep, bool(want_streams), counts
            )
            return result.to_tuple() if return_dict is False else result
        out = self.model(
            **batch,
            **images,
            labels=labels,
            output_hidden_states=bool(want_streams),
            logits_to_keep=logits_to_keep,
        )
        loss = out.loss
        if loss is not None and num_items_in_batch is not None:
            loss = loss * self.model.loss_denominators(**batch, labels=labels).supervised / num_items_in_batch
        result = DeepseekV41Output(loss=loss, logits=out.logits, hidden_states=out.hidden_states)
        return result.to_tuple() if return_dict is False else result

    @property
    def base_model(self) -> Backbone:  # type: ignore[override]
        """The model without its head, for trainers that compute the logits themselves, such as those of TRL."""
        return Backbone(self)

    # Training

    def _refuse_noise(self) -> None:
        """Raise ValueError if a trainer adds NEFTune noise to the embeddings: NEFTune does not expect the shape of
        embeddings here.
        """
        if self.training and getattr(self.model.embed, "neftune_noise_alpha", None) is not None:
            raise ValueError("neftune_noise_alpha is not supported, because this model adds no noise to its embeddings")

    def _trains_fully(self) -> bool:
        """Returns whether this forward pass adds the losses of `training_losses="full"`. Raises ValueError for trainer
        settings that "full" does not support (DeepSpeed, FSDP).
        """
        if not (self.training and torch.is_grad_enabled()):
            return False
        if hasattr(self, "hf_device_map"):
            raise ValueError("offloaded weights cannot be trained; load the model without device_map='auto'")
        if holds_packed(self.model) and _trains_all_it_can(self.model):
            raise ValueError(
                "the quantised weights of this checkpoint are kept packed and are not trained. Train an adapter of "
                "peft, set requires_grad of the parameters that shall be trained, or load the weights unpacked: "
                "from_pretrained(..., packed=False)"
            )
        if self.training_losses == "lm":
            return False
        if deepspeed.deepspeed_config() is not None or any(type(p).__name__ == "DTensor" for p in self.parameters()):
            raise ValueError(
                "training_losses='full' needs whole parameters and their own optimizer, not DeepSpeed's or FSDP's; "
                "train with several processes by DDP or by this project's `python -m train`, or set "
                "model.training_losses = 'lm'"
            )
        return True

    def _training_pass(
        self,
        batch: dict[str, Any],
        images: dict[str, Any],
        labels: Tensor | None,
        num_items: Tensor | int | None,
        logits_to_keep: int,
        keep_streams: bool,
        step: LossDenominators | None,
    ) -> DeepseekV41Output:
        """Returns the logits and, if labels are given, the loss, including the losses that `training_losses` adds."""
        layout, trace, added = self._pass(batch, images, labels, keep_streams, step)
        streams = tuple(layout.unflatten(s) for s in trace.streams) if keep_streams else None
        logits = self.model.head(trace.hidden)
        if labels is None:
            logits = _AddToGradient.apply(logits, added * self._weight_of_pass(step))
            return DeepseekV41Output(logits=layout.unflatten(logits)[:, -logits_to_keep:], hidden_states=streams)
        targets = layout.targets(labels)
        count = (targets >= 0).sum()
        total = count.clamp(min=1) if num_items is None else num_items
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / total
        share = 1 if num_items is None or step is not None else count / num_items
        logits = layout.unflatten(logits.detach())[:, -logits_to_keep:]
        return DeepseekV41Output(loss=loss + added * share, logits=logits, hidden_states=streams)

    def _pass(
        self,
        batch: dict[str, Any],
        images: dict[str, Any],
        labels: Tensor | None,
        keep_streams: bool = False,
        step: LossDenominators | None = None,
    ) -> tuple[SequenceLayout, BackboneOutput, Tensor]:
        """Run one forward pass in training mode. Returns the layout, the backbone's output, and the 0-d weighted sum of
        the added losses. Each added loss is divided by its count for the whole step, or by its count for this
        micro-batch if the counts of the step are not known. Indexers are trained on the supervised tokens, or on all
        tokens if there are no labels.
        """
        model, types = self.model, batch["vision_token_types"]
        layout = model.lay_out(
            batch["input_ids"],
            labels,
            attention_mask=batch["attention_mask"],
            seq_lens=batch.get("seq_lens"),
            vision_token_types=types,
        )
        trace = model.run_backbone(batch["input_ids"], layout, *images.values(), types, keep_streams=keep_streams)
        if labels is None:
            supervised = torch.ones(layout.tokens, dtype=torch.bool, device=trace.hidden.device)
        else:
            supervised = layout.targets(labels) >= 0
        indexed = any(p.requires_grad for name, p in model.named_parameters() if ".indexer." in name)
        losses = compute_losses(
            torch.zeros((), device=trace.hidden.device),
            supervised,
            [block.routing for block in trace.blocks],
            [(trace.blocks[source].indexer_loss_inputs, mass) for source, mass in trace.attention_mass.items()],
            layout,
            model.loss_weights,
            step or count_denominators(model.config.text, layout, supervised),
            model.runtime.train_indexer and indexed,
        )
        self._load = losses.expert_load if self._load is None else self._load + losses.expert_load
        self._passes += 1
        _TRAINED.add(self)
        return layout, trace, losses.total

    def denominators(self, labels: Tensor | None = None, **given: Any) -> Tensor:
        """Returns the contribution of a micro-batch to the counts of its step (see `counts.py`), int64 [2,
        2 + index sources] on the CPU, computed without a forward pass. The arguments are those of
        `DeepseekV41ForCausalLM.forward`.
        """
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        batch = batch_of(ids, mask, positions, given.get("seq_lens"), given.get("vision_token_types"), {})
        text = self.config.to_model_config().text
        layout = self.model.lay_out(**batch)
        every = torch.ones(layout.tokens, dtype=torch.bool, device=ids.device)
        taught = every if labels is None else layout.targets(labels) >= 0
        return torch.stack([count_denominators(text, layout, some).to_tensor() for some in (taught, every)]).cpu()

    def _weight_of_pass(self, step: LossDenominators | None) -> float:
        """Returns the factor by which the added losses are multiplied when they change only the gradient and not the
        reported loss. If the counts of the step are known, the factor undoes DDP's averaging of gradients over
        processes.
        """
        if step is None:
            return 1 / self._passes_of_step
        return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1.0

    @torch.no_grad()
    def _after_step(self) -> None:
        """Update the router biases after an optimizer step, in layers whose router is trained: the biases of overloaded
        experts are lowered, and the biases of underloaded experts are raised. All processes must call this method
        together.
        """
        load, self._load = self._load, None
        self._passes, self._passes_of_step = 0, max(1, self._passes)
        if load is None:
            return
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(load)
        for layer, counts in zip(self.model.layers, load, strict=True):
            gate = layer.ffn.gate
            if gate.weight.requires_grad:
                for bias, tokens in zip((gate.bias, gate.bias_vl), counts, strict=True):
                    # As in optim/balance.py: sign(mean load - load), computed exactly in integers.
                    bias += self.router_bias_rate * torch.sign(tokens.sum() - tokens * len(tokens)).to(bias.dtype)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        decoding: Decoding | None = None,
        use_drafter: bool | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Returns the arguments of the next forward pass in `generate`. These arguments always contain the whole
        sequences; `decoding` determines which tokens are new, and without `decoding` every step processes all tokens
        again. Only text prompts are supported.

        use_drafter is an argument of `generate` that `_sample` reads: The value True requires the drafter, False
        decodes without the drafter, and None uses the drafter if the other arguments allow speculative decoding.
        """
        if vision_token_types is not None:
            added = input_ids.shape[1] - vision_token_types.shape[1]
            vision_token_types = F.pad(vision_token_types, (0, added), value=-1)
        if vision_token_types is not None or logits_to_keep != 1 or output_hidden_states:
            decoding = None
        return dict(
            input_ids=input_ids,
            attention_mask=attention_mask,
            pixel_values=pixel_values,
            image_grid_hws=image_grid_hws,
            vision_token_types=vision_token_types,
            logits_to_keep=logits_to_keep,
            output_hidden_states=output_hidden_states,
            decoding=decoding,
        )

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        use_drafter: bool | None = None,
        **inputs: Any,
    ) -> Any:
        """Run the decoding loop of `generate` for greedy decoding and sampling. The drafter is used if the arguments
        allow speculative decoding; otherwise the loop of transformers runs. Raises ValueError with the reason if
        `use_drafter` is True and the drafter cannot be used.
        """
        against = hindrances(logits_processor, stopping_criteria, generation_config, streamer, inputs)
        if use_drafter and (against or self.drafter is None):
            why = f"cannot draft under {', '.join(against)}" if self.drafter is not None else "there is no drafter"
            raise ValueError(f"use_drafter=True: {why}; leave out use_drafter to decode without a drafter")
        if use_drafter is False or against or self.drafter is None:
            rest = dict(synced_gpus=synced_gpus, streamer=streamer, **inputs)
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **rest)  # type: ignore
        mask = inputs.get("attention_mask")
        return continued(self.drafter, input_ids, mask, logits_processor, stopping_criteria, generation_config)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *_: Any, **__: Any) -> None:
        if generation_config.use_cache is not False:
            model_kwargs["decoding"] = Decoding(self.model)

    # What libraries ask for

    def __getattr__(self, name: str) -> Any:
        if name == "lm_head":  # GRPOTrainer would replace it by a head that computes in fp32
            raise AttributeError(
                "cast_lm_head_to_fp32 is not supported, because this model has no lm_head; its head is "
                "get_output_embeddings(). Leave the option out: weights are fp32 unless they are loaded otherwise"
            )
        return super().__getattr__(name)

    def generate_batch(self, *_: Any, **__: Any) -> Any:
        """Raises ValueError: the continuous batching of transformers (an option of TRL's trainers) needs transformers'
        own cache.
        """
        raise ValueError(
            "generate_batch is not supported, because this model keeps its own cache; leave out "
            "use_transformers_continuous_batching and use_transformers_paged, and answers come from `generate`"
        )

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.model.embed = value

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.head

    def set_output_embeddings(self, value: torch.nn.Module) -> None:
        self.model.head = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> Any:
        """Return the embedding unchanged. Raises ValueError if `new_num_tokens` differs from the vocabulary size."""
        if new_num_tokens not in (None, self.config.text_config.vocab_size):
            raise ValueError(
                "the vocabulary of this model cannot be resized: the Engram tables and the output head depend on it"
            )
        return self.model.embed

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether every block is recomputed in the backward pass. `gradient_checkpointing_enable` switches
        recomputation on.
        """
        return self.model.runtime.recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        self.model.runtime = self.model.runtime.recomputing(on)


class Backbone:
    """A `DeepseekV41ForCausalLM` without its head, whose call returns hidden states. Every other attribute is looked up
    in the wrapped `DeepseekV41`.
    """

    def __init__(self, owner: DeepseekV41ForCausalLM):
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner.model, name)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_hws: Tensor | None = None,
        vision_token_types: Tensor | None = None,
        **others: Any,
    ) -> DeepseekV41HiddenStates:
        """Return the hidden states. The arguments are as in `DeepseekV41ForCausalLM.forward`; in training mode the
        gradient includes the added losses.
        """
        owner, model = self._owner, self._owner.model
        owner._refuse_noise()
        batch = batch_of(input_ids, attention_mask, position_ids, seq_lens, vision_token_types, others)
        images = dict(pixel_values=pixel_values, image_grid_hws=image_grid_hws)
        if owner._trains_fully():
            step = denominators_of(others.get(STEP_COUNTS), None)
            layout, trace, added = owner._pass(batch, images, None, step=step)
            hidden = _AddToGradient.apply(trace.hidden, added * owner._weight_of_pass(step))
        else:
            mask, types = batch["attention_mask"], vision_token_types
            layout = model.lay_out(
                input_ids, attention_mask=mask, seq_lens=batch.get("seq_lens"), vision_token_types=types
            )
            hidden = model.run_backbone(input_ids, layout, *images.values(), types).hidden
        return DeepseekV41HiddenStates(last_hidden_state=layout.unflatten(hidden))


class _AddToGradient(torch.autograd.Function):
    """Returns `passed` unchanged. In the backward pass `added` gets a gradient of one, as if `added` were a term of the
    loss.
    """

    @staticmethod
    def forward(ctx: Any, passed: Tensor, added: Tensor) -> Tensor:
        ctx.save_for_backward(added)
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.saved_tensors[0])


# Models that have run a forward pass in training mode
_TRAINED: weakref.WeakSet[DeepseekV41ForCausalLM] = weakref.WeakSet()


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """A hook that runs after the step of any optimizer, because a model cannot register a callback with transformers'
    trainers.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in list(_TRAINED):
        if any(id(p) in held for p in model.parameters()):
            model._after_step()


register_optimizer_step_post_hook(_after_any_step)


def _trains_all_it_can(model: DeepseekV41) -> bool:
    """Whether every weight that is not packed is trainable and there is no LoRA adapter, so the user chose no subset of
    weights.
    """
    named = [(name, p) for name, p in model.named_parameters() if not isinstance(p, PackedWeight)]
    return all(parameter.requires_grad for _, parameter in named) and not any(".lora_" in name for name, _ in named)
