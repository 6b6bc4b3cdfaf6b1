"""Checkpoints in the released layout: names, quantised and plain folders, conversion and merging.

A quantised weight that was loaded and not changed is saved with the same bytes. Its values alone do not determine its
scales (see `quantize.pack`), so the scales are kept: in `model.released_scales`, and in a plain folder in a file beside
the weights (`names.SCALES`).

Imports any file of model but the packed cache and generation. Each file imports only those before it:

    released    quantised safetensors files
    names       which tensors a model has
    load, save
    convert, merge
"""
