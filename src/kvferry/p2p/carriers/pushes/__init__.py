"""What goes in runs through slots: agreed on with the peer, gathered part by part, exchanged, scattered from there."""
