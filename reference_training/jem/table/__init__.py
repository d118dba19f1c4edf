"""`ebmguard table jem`: Tables 1 and 2 of the paper beside the numbers of runs."""
