"""The packed cache: the attention state that later tokens need, for many sequences of unequal length.

Kept for every sequence (main KV and index keys, the only parts that grow with its length, take 890 bytes a token at the
released sizes, V4.1 report):
  main KV      each entry of a Full layer as FP4 values with E4M3 scales (in the compute dtype when QAT is off)
  index keys   each entry of a Full layer as FP4 values with UE8M0 scales
  window       the last W window KVs of every layer as FP8 values with UE8M0 scales, in a ring
  open groups  projected values and gates of the tokens whose compression group is not complete
  history      the last token ids, which Engram's n-grams need
A drafter's stages have window rings too, numbered after the backbone's layers. Values read from the cache equal, bit
for bit, the output of the fake quantisers in the training forward.

Imports config, quantize, rope, layout and engram of model/, and no layer of the model. Each file imports only those
before it:

    store    rows of one kind of state
    pages    `Cache`: sequences, pages, shared prefixes
    step     `Step`, one forward pass over new tokens, and `LayerCache`, what one layer sees of it
"""
