"""How a model is spread over processes; without processes everything here is a no-op.

Read ranks.py (who holds what), exchange.py (rows between ranks), tables.py (sharded embeddings and head),
collective_errors.py (one rank's error becomes everybody's). Imports model/precision.py and no other file of model.
"""
