"""LoRA: low-rank factors beside frozen weights. Imports ``train.config`` and ``model``.

Read inject.py. Each file imports only those before it:

    targets        what can be given factors, by name
    peft_format    adapters on disk, as peft writes them
    inject         the factors in the model; training, saving, merging
"""
