"""The packed cache: it stores the attention state that later tokens need, for many sequences of unequal length.

For every sequence the cache stores five kinds of state:

  Main KV: every compressed entry of a Full layer, stored as FP4 values with E4M3 scales (compute dtype if QAT is off).

  Index keys: the indexer key of every compressed entry of a Full layer, stored as FP4 values with UE8M0 scales.

  Window: the sliding-window KVs of the last W tokens in every layer, as FP8 values with UE8M0 scales in a ring buffer.

  Open groups: the projected values and gates of the tokens whose compression group is not complete yet.

  History: the last token ids, which Engram needs for its n-grams.

Only main KV and index keys grow with the length of the sequence; they take 890 bytes per token at the sizes of the
released model (V4.1 report). Each stage of a drafter also has a ring buffer of window KVs; stages are numbered after
the layers of the backbone. Values read from the cache equal, bit for bit, the output of the fake quantisers in the
forward pass of training.

This package imports config, quantize, rope, layout and engram of model/, and no layer of the model. Each file imports
only files listed before it:

    store:   rows of one kind of attention state.
    pages:   `Cache`, with its sequences, pages and shared prefixes.
    step:    `Step`, one forward pass over new tokens, and `LayerCache`, the interface of one layer to the cache.
"""
