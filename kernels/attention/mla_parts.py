"""What mla_decode.cu and mla_decode_e4m3.cu have alike: DeepSeek's sizes, and how a sequence is cut into parts."""

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
THREADS = 256
ROWS = 16  # heads of a block
PANEL = 16  # tokens that are copied at once
SPLIT = 256  # tokens: about what is worth a block of its own, where all multiprocessors have one
AT_ONCE = 4  # KV splits of a sequence that one block adds up
PART = ROWS * LATENT + ROWS  # floats that are kept of a part
