"""What goes in parts through slots: gathered into one, pushed, exchanged with the peer, scattered from there."""
