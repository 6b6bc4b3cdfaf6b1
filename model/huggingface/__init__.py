"""Makes the model available as a transformers model. After this package is imported,
`AutoModelForCausalLM.from_pretrained(folder)` works.

    import model.huggingface
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)

Weights are read and written by `model/checkpoint`, so checkpoint folders have the released layout and names, and can be
plain, bf16 or quantised. `Trainer` and TRL's trainers train all parts of the model, including indexers and router
biases (`training_losses="full"`), see `DeepseekV41ForCausalLM.training_losses`. In this project, only this package
imports transformers.

It may import every other file of model/. Read modeling.py first. Each file imports only files listed before it:

    configuration:         the keys of config.json.
    batch, folders:        convert the arguments of `forward`, `from_pretrained` and `save_pretrained`.
    counts:                the token counts of a whole step, by which mean losses are divided.
    decoding, speculation:  `generate` without and with a drafter.
    modeling:              `DeepseekV41ForCausalLM`.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model.config import MODEL_TYPE
from model.huggingface.configuration import DeepseekV41Config, DeepseekV41TextConfig, DeepseekV41VisionConfig
from model.huggingface.counts import count_whole_steps
from model.huggingface.modeling import DeepseekV41ForCausalLM

__all__ = [
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "DeepseekV41TextConfig",
    "DeepseekV41VisionConfig",
    "count_whole_steps",
]

MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = "DeepseekV41ForCausalLM"  # for Trainer's label smoothing
AutoConfig.register(MODEL_TYPE, DeepseekV41Config, exist_ok=True)
AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
AutoTokenizer.register(DeepseekV41Config, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
