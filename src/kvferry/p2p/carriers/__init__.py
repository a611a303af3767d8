"""What moves the bytes of transfers that both sides have agreed on."""
