"""What a job costs on a layout of GPUs, computed without allocating anything.

The model is built on the meta device; every number follows from the sizes of its tensors, from ``model/count.py`` and
from the settings ``plan`` and ``parallel.hardware``. The layout is that of ``model/parallel`` in a ZeRO stage 0 engine.
Every rank takes part in data parallelism. The routed experts are split over ``expert_parallel`` ranks; the rows of the
Engram tables, and with ``shard_embeddings`` those of embedding and head, over ``table_shards``; the rows of the blocks'
dense matrices over ``dense_shards``, except while their block runs; everything else is whole on every rank. A
parameter's optimizer state is held by one owner among the ranks with the same parameter.
``tests/bench/bench_plan.py`` compares this with what two processes hold and send.

Not counted: images, and the temporary tensors of single operations (the reserve has room for them).

From the bottom to the top; each file imports only those before it:

    items        the parameters of a job; weights, gradients and optimizer state of a rank
    job          what is trained, whatever the layout
    memory       activations, buffers and copies of a micro-batch
    traffic      bytes that a rank sends; seconds of a step
    resources    the plan of a layout
    report       the plan as text, with a verdict and what to change
"""
