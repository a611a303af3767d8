"""Translation between engines and KVferry: one package an engine, none of which imports another."""
