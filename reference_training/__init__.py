"""Complete trainers built on the public names of ebmguard, its first customers."""
