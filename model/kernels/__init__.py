"""Triton kernels beside the plain functions they replace: one file each, of the same name.

`switch` says which of the two runs; nothing here imports Triton before a kernel is wanted. `launch` runs a kernel, or
records what it would run; `table` compiles all of them for a GPU that need not be there. Each file imports only those
before it:

    switch, launch
    rounding, sums
    norm, engram, hyper, indexer, moe, rope, sparse
    table
"""
