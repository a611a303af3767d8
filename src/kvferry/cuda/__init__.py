"""The only code that calls the CUDA driver and its run-time compiler."""
