"""Models: where they come from, whether they fit, and the one door to run them."""
