"""`ebmguard figure`: the paper's JEM figures (3, 4 and 16 to 25), as pictures and as numbers."""
