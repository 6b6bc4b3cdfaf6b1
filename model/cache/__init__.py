"""The packed cache: what a sequence leaves behind for its next token, for many sequences of unequal length.

Kept of every sequence (released sizes: 890 bytes a token of what grows, V4.1 report):
  main KV      each entry of a Full layer as FP4 values with E4M3 scales (in the compute dtype when QAT is off)
  index keys   each entry of a Full layer as FP4 values with UE8M0 scales
  window       the last W window KVs of every layer as FP8 values with UE8M0 scales, in a ring
  open groups  projected values and gates of the tokens whose compression group is not complete
  history      the last token ids that Engram looks back at
A drafter's stages have window rings too, numbered on behind the layers. What is read back equals, bit for bit, what the
training forward's fake quantisers give.

Imports model's config, quantize, rope, layout and engram, no layer of the model. Each file imports only those before:

    store    rows of one kind of state
    pages    `Cache`: sequences, pages, shared prefixes
    step     one pass over new tokens
"""
