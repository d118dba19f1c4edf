"""`ebmguard trace`: runs a trainer for a few steps, and says where and how to guard it."""
