"""Computes the memory, traffic and time that a training run needs on some number of GPUs, without allocating anything.

The model is built on the meta device. All numbers follow from the sizes of its tensors, from ``model/count.py`` and
from the settings ``plan`` and ``parallel.hardware``. The parameters are split over ranks as in ``model/parallel`` with
a ZeRO stage 0 engine: every rank takes part in data parallelism; the routed experts are split over ``expert_parallel``
ranks; the rows of the Engram tables, and with ``shard_embeddings`` the rows of embedding and head, are split over
``table_shards`` ranks. The rows of the blocks' dense matrices are split over ``dense_shards`` ranks, which gather them
while a block runs. Every rank holds a full copy of all other parameters. The optimizer state of a parameter is held by
only one of the ranks that hold the parameter. ``tests/bench/bench_plan.py`` compares the planned memory and traffic
with measurements on two or four processes.

Images and the temporary tensors of single operations are not counted; the reserve (``ResourcePlan.reserve``) leaves
memory for such temporary tensors.

Each file imports only files listed above it:

    items        the parameters of a run, and the weights, gradients and optimizer state that a rank holds
    job          the model and its trained parameters, independent of the layout over GPUs
    memory       memory that a micro-batch needs for activations, buffers and temporary copies
    traffic      the bytes that a rank sends in a step, and how long a step takes
    resources    combines memory, traffic and time into the plan of one layout
    layouts      lists the ways to spread a job over GPUs
    verdict      whether the job fits, and what to change if it does not
    report       formats the plan as text
    search       finds other layouts that fit
"""
