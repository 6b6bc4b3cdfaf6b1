"""How a model is spread over processes; without processes everything here is a no-op.

Imports model/precision.py and no other file of model. Each file imports only those before it:

    ranks                who holds what
    exchange             rows between ranks
    context              what ranks exchange that share a row
    tables               sharded embeddings and head
    collective_errors    one rank's error becomes everybody's
"""
