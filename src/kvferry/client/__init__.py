"""What engines call to keep their KV in a cache server and to get it back."""

from kvferry.client.client import CacheClient, Lookup
from kvferry.client.jobs import Job, RetrieveResult, StoreResult

__all__ = ["CacheClient", "Job", "Lookup", "RetrieveResult", "StoreResult"]
