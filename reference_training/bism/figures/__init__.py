"""`ebmguard figure bilevel`: what the bi-level update's steps do to the gradient."""
