"""Pictures and tables: a canvas, samples as images, numbers as people read them."""
