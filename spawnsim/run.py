"""Choose a building, run a program in it, and hand back what was recorded."""
