"""`ebmguard figure` and `ebmguard table`: the papers' figures and tables, from runs, as numbers."""
