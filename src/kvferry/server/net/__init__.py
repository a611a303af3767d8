"""Sockets of the server: who may connect, what comes in, what goes out; and the loop that waits for all of it."""
