"""The configuration of the model as transformers reads it: the keys of the released config.json."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers.configuration_utils import PreTrainedConfig

from model.config import MODEL_TYPE, ModelConfig

_OF_TRANSFORMERS = {f.name for f in dataclasses.fields(PreTrainedConfig)} | {"name_or_path", "attn_implementation"}


class _Section(PreTrainedConfig):
    """A section `text_config` or `vision_config` of config.json. The attributes of a section are the keys of the
    released config.json, which are written back unchanged.
    """

    rope_scaling = None  # a key of the released config.json; in the base class this name is an alias of another key

    def __init__(self, **released: Any):
        PreTrainedConfig.__init__(self)
        self._released = tuple(key for key in released if key != "model_type")
        for key in self._released:
            setattr(self, key, released[key])

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **{key: getattr(self, key) for key in self._released}}


class DeepseekV41TextConfig(_Section):
    model_type = f"{MODEL_TYPE}_text"
    base_config_key = "text_config"
    __init__ = _Section.__init__  # transformers would otherwise generate another constructor for the subclass


class DeepseekV41VisionConfig(_Section):
    model_type = f"{MODEL_TYPE}_vision"
    base_config_key = "vision_config"
    __init__ = _Section.__init__


class DeepseekV41Config(PreTrainedConfig):
    """The transformers configuration with the keys of the released config.json. `ModelConfig` validates the values of
    these keys, and raises a ValueError that lists every problem.

    `text_config` and `vision_config` hold the keys of these sections as attributes; `to_model_config` returns the
    `ModelConfig` that the model is built from. Keys that neither the release nor transformers defines are kept and
    written back.
    """

    model_type = MODEL_TYPE
    sub_configs = {"text_config": DeepseekV41TextConfig, "vision_config": DeepseekV41VisionConfig}
    keys_to_ignore_at_inference = ["hidden_states"]
    auto_map: ClassVar[dict[str, str]] = {}  # TRL reads this attribute; it is empty because the folder holds no code

    def __init__(self, text_config: Any = None, vision_config: Any = None, **rest: Any):
        sections = {"text_config": text_config, "vision_config": vision_config}
        raw = {key: value for key, value in rest.items() if key not in _OF_TRANSFORMERS and not key.startswith("_")}
        raw |= {k: v.to_dict() if isinstance(v, PreTrainedConfig) else v for k, v in sections.items() if v is not None}
        released = ModelConfig.from_dict(raw).to_dict()
        super().__init__(**{key: value for key, value in rest.items() if key in _OF_TRANSFORMERS})
        self.text_config = DeepseekV41TextConfig(**released.pop("text_config"))
        self.vision_config = DeepseekV41VisionConfig(**released.pop("vision_config"))
        for key in ("model_type", "architectures"):
            released.pop(key)
        self.architectures = ["DeepseekV41ForCausalLM"]
        self._released = tuple(released)
        for key, value in released.items():
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        sections = {key: getattr(self, key).to_dict() for key in self.sub_configs}
        dtype = {} if self.dtype is None else {"dtype": str(self.dtype).removeprefix("torch.")}
        top = {"model_type": self.model_type, "architectures": self.architectures, **dtype}
        return {**top, **sections, **{key: getattr(self, key) for key in self._released}}

    to_diff_dict = to_dict  # every key is written, as in the released file

    def to_model_config(self) -> ModelConfig:
        return ModelConfig.from_dict(self.to_dict())
