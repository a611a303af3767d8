"""What engines call to keep their KV in a cache server and to get it back."""

from kvferry.client.client import CacheClient
from kvferry.client.jobs import Job, RetrieveResult, StoreResult
from kvferry.client.lookups import Lookup, Prefetch

__all__ = ["CacheClient", "Job", "Lookup", "Prefetch", "RetrieveResult", "StoreResult"]
