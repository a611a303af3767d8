"""The front door of prefill and decode engines: one OpenAI-compatible address for all of them."""
