"""DSpark, the drafter for speculative decoding: a few blocks that propose several next tokens in one pass, from the
hidden states of the backbone.

The architecture follows the released inference code and the V4.1 report (arXiv 2609.19969). The anchor a is the
position of the most recent token, so the backbone has processed positions 0..a-1. A block of B drafts starts at the
anchor: its inputs are the anchor token and B-1 noise tokens, each copied to n residual streams. Every draft attends to
the context keys of positions max(0, a-W)..a-1 and to all B keys of its own block, without a causal mask inside the
block. Each stage of the drafter computes its own context keys from `main_x`, a normalised projection of the backbone's
residual streams at the target layers. Slot i of a block (i = 0..B-1) proposes the token at position a+1+i. The Markov
head adds to the logits of a slot a bias that depends on the token before it, and the confidence head predicts whether
the proposal will be accepted.

The drafter also uses the embedding and the head of the backbone; no parameter of the backbone gets a gradient.

The loss is 0.1 CE + 0.9 L1 + 1.0 BCE, as in DeepSpec (arXiv 2607.05147). The loss compares q, the drafter's
distribution given the true previous tokens, with p, the distribution of the backbone. Slot i has the weight exp(-i/4),
or 0 unless slots 0..i all have a target token (are supervised).

In shapes, T is the number of tokens without padding, N the number of drafted blocks, B the block size, W the window
size, n the number of residual streams, d the hidden size, H the number of heads, D the head dimension, V the vocabulary
size, r the rank of the Markov head and A the number of anchors in a row.

The package may import the files and packages that model/__init__.py lists above `dspark`. Each file imports only files
listed before it:

    layout:   the anchors of a batch, and the context keys that each block of drafts attends to.
    losses:   supervised slots, their weights, and the losses and denominators of a step.
    stage:    a stage of the drafter, its two heads, and the attention of drafts.
    drafter:  the drafter itself.
    build:    builds a drafter, newly initialised or from a checkpoint folder.
"""

from model.dspark.build import build_drafter, load_drafter
from model.dspark.drafter import Draft, Drafted, Drafter
from model.dspark.losses import DraftDenominators, DraftLoss, DraftLosses, slot_weights

__all__ = [
    "Draft",
    "DraftDenominators",
    "DraftLoss",
    "DraftLosses",
    "Drafted",
    "Drafter",
    "build_drafter",
    "load_drafter",
    "slot_weights",
]
