"""LoRA: low-rank factors added to frozen weights. This package imports ``train.config`` and ``model``.

Read inject.py first. Each file imports only files listed above it:

    targets        the names of the groups of modules that can get factors
    peft_format    reads adapters that are stored in `peft`'s format
    serving        writes an adapter as serving engines load it; reports what a merge has rounded away
    inject         adds the factors to a model, and trains, saves and merges them
"""
