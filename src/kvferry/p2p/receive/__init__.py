"""Where tensors and blocks are kept that have landed and that nobody has claimed yet."""
