"""Triton kernels. The kernels of a file replace plain PyTorch functions of the file of the same name in model/.

`switch` decides whether the kernel or the plain function runs; Triton is imported only when a kernel is needed.
`launch` launches a kernel or, on meta tensors, records the launch; `table` compiles every kernel, also without a GPU.
Each file imports only files listed before it:

    switch, launch
    rounding, sums
    norm, engram, hyper, indexer, moe, rope, sparse
    table
"""
