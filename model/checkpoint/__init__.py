"""Checkpoints in the released layout: names, quantised and plain folders, conversion and merging.

Released -> ours -> released gives back the bytes of every quantised weight that was not changed. The values alone do
not determine the scales they were stored with (see `quantize.pack`), so these are kept: in `model.released_scales`,
and in plain folders beside the weights (`names.SCALES`).

Imports any file of model but the packed cache and generation. Each file imports only those before it:

    released    quantised safetensors files
    names       which tensors a model has
    load, save
    convert, merge
"""
