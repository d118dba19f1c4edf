"""What every trainer runs on: one loop, and all that a run writes, keeps and goes on from."""
