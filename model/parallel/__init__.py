"""Splits a model over processes. With a single process everything here is a no-op.

This package imports model/precision.py and no other file of model/. Each file imports only files listed before it:

    ranks:               which process holds which part of the model.
    exchange:            sends rows of tensors between ranks.
    context:             the exchanges of context parallelism.
    tables:              embeddings and head whose rows are split over ranks.
    collective_errors:   raises an error of one rank on all ranks.
"""
