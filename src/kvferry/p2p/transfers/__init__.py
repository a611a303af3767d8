"""What becomes of each transfer, on both sides. Bookkeeping only: no sockets, no memory, no clock, no locks."""
