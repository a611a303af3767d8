"""Prefill and decode in different engines: vLLM's P2pNcclConnector, which vLLM itself has no more."""
