"""One worker thread a device: it maps engines' memory there, and copies. What it is asked, and what it answers."""
