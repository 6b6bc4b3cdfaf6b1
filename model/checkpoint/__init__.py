"""Reads, writes, converts and merges checkpoints in the released layout, in quantised and plain folders.

A quantised weight that is loaded and saved unchanged keeps its bytes. The values of a weight do not determine its
scales (see `quantize.pack`), so the loaded scales are kept: in memory in `model.released_scales`, and in a plain folder
in a file beside the weights (`names.SCALES`).

This package may import any file of model/ except the packed cache and generation. Each file imports only files listed
before it:

    released:        quantised safetensors files.
    names:           the names of a model's tensors and of the files of a checkpoint folder.
    load, save:      reading and writing a checkpoint folder.
    convert, merge:  converting a folder to another format; averaging several checkpoints.
"""
