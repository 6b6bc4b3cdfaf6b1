"""Checkpoints in the released layout: names, quantised and plain folders, conversion and merging.

Released -> ours -> released gives back the bytes of every quantised weight that was not changed. The values alone do
not determine the scales they were stored with (see `quantize.pack`), so these are kept: in `model.released_scales`,
and in plain folders beside the weights (`names.SCALES`).

Read names.py (which tensors a model has), released.py (quantised safetensors files), load.py, save.py, then convert.py
and merge.py. Imports any file of model but the packed cache and generation.
"""
