"""The tiny decoder's sizes, apart from torch so that the demo can read them without it."""

LAYERS = 4
HIDDEN = 256
HEADS = 8
KV_HEADS = 4
HEAD = 32
INTERMEDIATE = 640
VOCABULARY = 256  # bytes
ROPE_THETA = 10000.0
