"""The 2D (and 1D) toys: every density known exactly, many models trained as one batched network."""
