"""`ebmguard figure`: the paper's toy figures (2 and 5 to 11), as pictures and as numbers."""
