"""The one-sided carrier for engines on one host: the receiver copies from the sender's blocks, which it has mapped."""
