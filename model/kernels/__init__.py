"""Triton kernels. Each file has the name of the file in model/ whose plain functions its kernels replace.

`switch` decides whether the kernel or the plain function runs; Triton is imported only when a kernel is needed.
`launch` launches a kernel or, on meta tensors, records the launch; `table` compiles every kernel, also without a GPU.
Each file imports only files listed before it:

    switch, launch
    rounding, sums
    norm, engram, hyper, indexer, moe, rope, sparse
    table
"""
