"""Messages between engines and the cache server, and how they lie on a socket."""
