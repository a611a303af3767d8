"""Disk and object store as the server uses them: their threads, and the loop's books of what goes down and comes up."""
